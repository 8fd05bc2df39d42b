"""DDIM's rows against the formulas of its paper in float64, and eta."""

import hashlib
import math

import pytest
import torch

from fastdiff import DDIMScheduler, DDPMScheduler
from fastdiff.errors import InputError
from fastdiff.kernels.denoise import StepOptions, denoise_step
from fastdiff.samplers.shared.betas import make_alpha_bar

PREDICTIONS = ("epsilon", "sample", "v_prediction")
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


@pytest.mark.parametrize("clipped", [False, True], ids=["eps", "clipped-eps"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_ddim_of_a_perfect_model_follows_the_forward_process(forward_process, prediction, clipped):
    """Song et al. 2021, eq. 12 with eta 0: x_{t-1} is the same picture with less of the same noise."""
    ddim = DDIMScheduler(prediction_type=prediction, timestep_spacing="trailing", beta_schedule="scaled_linear")
    alpha_bar = make_alpha_bar(ddim.betas.double())
    schedule = ddim.schedule(10, use_clipped_model_output=clipped)
    for t, row in zip(schedule.timesteps.tolist(), schedule.rows, strict=True):
        x_0, eps, x_t, output = forward_process(prediction, alpha_bar[t].item())
        after = alpha_bar[t - 100].item() if t >= 100 else 1.0
        x_prev, x0 = denoise_step(output, x_t, row, StepOptions())
        assert (x0 - x_0).abs().max() < 1e-6 / math.sqrt(alpha_bar[t])  # eps is divided by a small signal
        assert (x_prev - (math.sqrt(after) * x_0 + math.sqrt(1 - after) * eps)).abs().max() < 1e-5


def test_ddim_with_eta_one_has_the_variance_of_ddpm(column):
    options = {"timestep_spacing": "trailing", "clip_sample": False}
    ddim, ddpm = DDIMScheduler(**options).schedule(20, eta=1.0), DDPMScheduler(**options).schedule(20)
    torch.testing.assert_close(column(ddim, "sigma"), column(ddpm, "sigma"))
    half = DDIMScheduler(**options).schedule(20, eta=0.5)
    torch.testing.assert_close(2 * column(half, "sigma"), column(ddim, "sigma"))


def test_ddpm_goes_to_the_next_timestep_and_ddim_a_fixed_way(column):
    """With 3 of 10 steps and linspace (9, 4, 0), DDPM steps from 9 to 4, and DDIM from 9 to 9 - 10 // 3 = 6."""
    options = {"num_train_timesteps": 10, "timestep_spacing": "linspace", "prediction_type": "sample"}
    alpha_bar = DDPMScheduler(**options).alphas_cumprod.double()
    ddpm, ddim = DDPMScheduler(**options).schedule(3), DDIMScheduler(**options).schedule(3)
    assert ddpm.timesteps.tolist() == ddim.timesteps.tolist() == [9, 4, 0]
    assert column(ddim, "prev_x0")[0].item() == pytest.approx(alpha_bar[6].sqrt().item())
    expected = alpha_bar[4].sqrt() * (1 - alpha_bar[9] / alpha_bar[4]) / (1 - alpha_bar[9])
    assert column(ddpm, "prev_x0")[0].item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_last_alpha_bar_is_one_or_that_of_timestep_zero(column):
    one = DDIMScheduler().schedule(10)
    first = DDIMScheduler(set_alpha_to_one=False).schedule(10)
    assert column(one, "prev_x0")[-1] == 1
    assert column(first, "prev_x0")[-1].item() == pytest.approx(math.sqrt(1 - 1e-4), rel=1e-6)


@pytest.mark.parametrize("eta", [-0.1, math.nan, math.inf])
def test_eta_out_of_range(eta):
    with pytest.raises(InputError, match=r"eta: .* is not a number of at least 0"):
        DDIMScheduler().schedule(10, eta=eta)


def test_eta_with_more_noise_than_there_is():
    with pytest.raises(InputError, match=r"eta is 5\.0, more noise than the next timestep has; use eta from 0 to 1"):
        DDIMScheduler().schedule(10, eta=5.0)


def test_eta_one_from_pure_noise_is_never_the_root_of_a_rounding():
    """sigma^2 equals the next timestep's variance. Rounding makes it larger in half of these; diffusers gets NaN."""
    ddim = DDIMScheduler(**ZERO_SNR, prediction_type="v_prediction")
    for steps in range(1, 200):
        assert ddim.schedule(steps, eta=1.0).rows.isfinite().all()


# Options, options of the run, the rows of 3 steps in the order of `golden_columns`, and the hash of 50 steps' rows.
GOLDEN = {
    "epsilon": (
        {"beta_schedule": "squaredcos_cap_v2"},
        {},
        [
            [1.0, -0.86833143, 0.49598444, 0.86137956, 0.0, 0.50796187, 0.0, 0.0, 0.0],
            [1.0, -0.50796187, 0.86137956, 0.9999793, 0.0, 0.006426976, 0.0, 0.0, 0.0],
            [1.0, -0.006426976, 0.9999793, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        "1c8e5f3de7f961ca",
    ),
    "v-zero-snr-half-eta": (
        {
            "beta_schedule": "squaredcos_cap_v2",
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
            "prediction_type": "v_prediction",
        },
        {"eta": 0.5},
        [
            [0.0, -1.0, 1.0, 0.4959597, 0.7520093, 0.0, 0.43417278, 0.0, 0.0],
            [0.4959597, -0.86834556, 1.0, 0.86137295, 0.38915652, 0.2222686, 0.2391455, 0.0, 0.0],
            [0.8621637, -0.5066298, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        "bcdf65b34b5b972c",
    ),
    "sample-ddpms-variance": (
        {
            "beta_schedule": "squaredcos_cap_v2",
            "prediction_type": "sample",
            "timestep_spacing": "linspace",
            "set_alpha_to_one": False,
        },
        {"eta": 1.0},
        [
            [0.0, 1.0, 1.0, 0.49598444, 0.0, -0.0, 0.86833143, 0.0, 0.0],
            [0.0, 1.0, 1.0, 0.96269906, 0.10509238, -0.073736, 0.2600059, 0.0, 0.0],
            [0.0, 1.0, 1.0, 0.9999793, 0.99999994, -0.99997926, 0.0, 0.0, 0.0],
        ],
        "2f4af051194f858f",
    ),
    "epsilon-clipped-again": (
        {"beta_schedule": "squaredcos_cap_v2"},
        {"eta": 0.3, "use_clipped_model_output": True},
        [
            [1.0, -0.86833143, 0.49598444, 0.5830512, 0.5611635, 0.0, 0.14348346, 0.0, 0.0],
            [1.0, -0.50796187, 0.86137956, 0.9895827, 0.012069765, 0.0, 0.0019279784, 0.0, 0.0],
            [1.0, -0.006426976, 0.9999793, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        "c3c804585e97926b",
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_rows_written_out(golden_columns, case, roots_of_ieee):
    """The rows are the same on every machine: float64 betas, then operations that IEEE 754 rounds exactly."""
    options, run, rows, digest = GOLDEN[case]
    ddim = DDIMScheduler(**options)
    assert torch.equal(golden_columns(ddim.schedule(3, **run)), torch.tensor(rows))
    of_50_steps = golden_columns(ddim.schedule(50, **run))
    assert hashlib.sha256(of_50_steps.numpy().tobytes()).hexdigest()[:16] == digest

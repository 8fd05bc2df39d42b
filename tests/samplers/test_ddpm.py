"""DDPM's rows against the formulas of its paper in float64, and its variances."""

import hashlib

import pytest
import torch

from fastdiff import DDPMScheduler
from fastdiff.errors import InputError
from fastdiff.kernels.denoise import StepOptions, denoise_step
from fastdiff.samplers.shared.betas import make_alpha_bar

PREDICTIONS = ("epsilon", "sample", "v_prediction")


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_small_log", "fixed_large"])
def test_ddpm_of_a_perfect_model_is_the_posterior(column, forward_process, prediction, variance):
    """Ho et al. 2020, eq. 6 and 7, in float64, computed from the betas."""
    ddpm = DDPMScheduler(prediction_type=prediction, variance_type=variance, timestep_spacing="trailing")
    alpha_bar = make_alpha_bar(ddpm.betas.double())
    schedule = ddpm.schedule(10)
    for i, t in enumerate(schedule.timesteps.tolist()):
        x_0, _, x_t, output = forward_process(prediction, alpha_bar[t].item())
        after = alpha_bar[t - 100] if t >= 100 else torch.tensor(1.0)
        beta = 1 - alpha_bar[t] / after
        posterior = (1 - after) / (1 - alpha_bar[t]) * beta
        mean = (after.sqrt() * beta * x_0 + (1 - beta).sqrt() * (1 - after) * x_t) / (1 - alpha_bar[t])
        x_prev, _ = denoise_step(output, x_t, schedule.rows[i], StepOptions())
        assert (x_prev - mean).abs().max() < 1e-5
        std = (beta if variance == "fixed_large" else posterior.clamp(min=1e-20)).sqrt()
        assert column(schedule, "sigma")[i] == pytest.approx(std.item(), rel=1e-5)


def test_learned_range_lies_between_the_two_fixed_variances(column):
    small, large, learned = (
        DDPMScheduler(variance_type=variance).schedule(10)
        for variance in ("fixed_small", "fixed_large", "learned_range")
    )
    noisy = slice(0, -1)  # timestep 0 adds no noise
    torch.testing.assert_close(column(learned, "log_variance_min")[noisy], 2 * column(small, "sigma")[noisy].log())
    torch.testing.assert_close(column(learned, "log_variance_max")[noisy], 2 * column(large, "sigma")[noisy].log())
    assert column(learned, "sigma").tolist() == [1] * 9 + [0]
    assert learned.options.variance == "learned_range"


def test_fixed_large_log_is_refused():
    with pytest.raises(InputError, match=r"variance_type fixed_large_log .* use fixed_large"):
        DDPMScheduler(variance_type="fixed_large_log").schedule(10)


# Options, the rows of 3 steps in the order of `golden_columns`, and the hash of 50 steps' rows.
GOLDEN = {
    "epsilon-fixed-small": (
        {"beta_schedule": "squaredcos_cap_v2"},
        [
            [1.0, -0.86833143, 0.49598444, 0.7636484, 0.19704469, 0.0, 0.4782782, 0.0, 0.0],
            [1.0, -0.50796187, 0.86137956, 0.9998606, 0.00013789693, 0.0, 0.006426594, 0.0, 0.0],
            [1.0, -0.006426976, 0.9999793, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        ],
        "7253c980d2a15a8a",
    ),
    "v-zero-snr-fixed-large": (
        {
            "beta_schedule": "laplace",
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
            "prediction_type": "v_prediction",
            "variance_type": "fixed_large",
        },
        [
            [0.0, -1.0, 1.0, 0.7816102, 0.0, 0.0, 1.0, 0.0, 0.0],
            [0.7816102, -0.62376714, 1.0, 0.25913984, 0.7350317, 0.0, 0.34777486, 0.0, 0.0],
            [0.83364815, -0.5522959, 1.0, 1.0, 0.0, 0.0, 0.5522959, 0.0, 0.0],
        ],
        "d4e145b0dcf32aa0",
    ),
    "sample-learned-range": (
        {
            "beta_schedule": "squaredcos_cap_v2",
            "prediction_type": "sample",
            "timestep_spacing": "linspace",
            "variance_type": "learned_range",
        },
        [
            [0.0, 1.0, 1.0, 0.7016303, 3.5661673e-05, 0.0, 1.0, -0.67783505, 0.0],
            [0.0, 1.0, 1.0, 0.9999392, 5.7083507e-05, 0.0, 1.0, -10.0945425, -0.67787516],
            [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, -46.0517, -10.094502],
        ],
        "7817782e5cb8233a",
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_rows_written_out(golden_columns, case, roots_of_ieee):
    """The rows are the same on every machine: float64 betas, then operations that IEEE 754 rounds exactly."""
    options, rows, digest = GOLDEN[case]
    ddpm = DDPMScheduler(**options)
    assert torch.equal(golden_columns(ddpm.schedule(3)), torch.tensor(rows))
    of_50_steps = golden_columns(ddpm.schedule(50))
    assert hashlib.sha256(of_50_steps.numpy().tobytes()).hexdigest()[:16] == digest

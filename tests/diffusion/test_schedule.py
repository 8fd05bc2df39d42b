"""Scheduler configs, timesteps and coefficient rows, against the papers' formulas in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff.diffusion.schedule import (
    DDIMConfig,
    DDPMConfig,
    custom_timesteps,
    ddim_schedule,
    ddpm_schedule,
    make_alpha_bar,
    make_betas,
    spaced_timesteps,
)
from fastdiff.errors import InputError
from fastdiff.kernels.denoise import COLUMNS, StepOptions, denoise_step

PREDICTIONS = ("epsilon", "sample", "v_prediction")


def column(schedule, name):
    return schedule.rows[:, COLUMNS.index(name)].double()


def forward_process(prediction, alpha_bar, seed=0):
    """x_0 in [-1, 1], its noise, x_t, and what a perfect model says of x_t; (1, 8, 8, 3) float64."""
    generator = torch.Generator().manual_seed(seed)
    x_0 = torch.rand((1, 8, 8, 3), generator=generator, dtype=torch.float64) * 2 - 1
    eps = torch.randn((1, 8, 8, 3), generator=generator, dtype=torch.float64)
    signal, noise = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
    output = {"epsilon": eps, "sample": x_0, "v_prediction": signal * eps - noise * x_0}[prediction]
    return x_0, eps, signal * x_0 + noise * eps, output


@pytest.mark.parametrize("clipped", [False, True], ids=["eps", "clipped-eps"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_ddim_of_a_perfect_model_follows_the_forward_process(prediction, clipped):
    """Song et al. 2021, eq. 12 with eta 0: x_{t-1} is the same picture with the same noise, less of it."""
    config = DDIMConfig(prediction_type=prediction, timestep_spacing="trailing", beta_schedule="scaled_linear")
    alpha_bar = make_alpha_bar(make_betas(config).double())
    schedule = ddim_schedule(config, 10, use_clipped_model_output=clipped)
    for t, row in zip(schedule.timesteps.tolist(), schedule.rows, strict=True):
        x_0, eps, x_t, output = forward_process(prediction, alpha_bar[t].item())
        after = alpha_bar[t - 100].item() if t >= 100 else 1.0
        x_prev, x0 = denoise_step(output, x_t, row, StepOptions(clip_range=1.0))
        assert (x0 - x_0).abs().max() < 1e-6 / math.sqrt(alpha_bar[t])  # eps is divided by a small signal
        assert (x_prev - (math.sqrt(after) * x_0 + math.sqrt(1 - after) * eps)).abs().max() < 1e-5


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_small_log", "fixed_large"])
def test_ddpm_of_a_perfect_model_is_the_posterior(prediction, variance):
    """Ho et al. 2020, eq. 6 and 7, in float64 from the betas."""
    config = DDPMConfig(prediction_type=prediction, variance_type=variance, timestep_spacing="trailing")
    alpha_bar = make_alpha_bar(make_betas(config).double())
    schedule = ddpm_schedule(config, 10)
    for i, t in enumerate(schedule.timesteps.tolist()):
        x_0, _, x_t, output = forward_process(prediction, alpha_bar[t].item())
        after = alpha_bar[t - 100] if t >= 100 else torch.tensor(1.0)
        beta = 1 - alpha_bar[t] / after
        posterior = (1 - after) / (1 - alpha_bar[t]) * beta
        mean = (after.sqrt() * beta * x_0 + (1 - beta).sqrt() * (1 - after) * x_t) / (1 - alpha_bar[t])
        x_prev, _ = denoise_step(output, x_t, schedule.rows[i], StepOptions(clip_range=1.0))
        assert (x_prev - mean).abs().max() < 1e-5
        std = (beta if variance == "fixed_large" else posterior.clamp(min=1e-20)).sqrt()
        assert column(schedule, "sigma")[i] == pytest.approx(std.item(), rel=1e-5)


def test_ddim_with_eta_one_has_the_variance_of_ddpm():
    options = {"timestep_spacing": "trailing", "clip_sample": False}
    ddim, ddpm = ddim_schedule(DDIMConfig(**options), 20, eta=1.0), ddpm_schedule(DDPMConfig(**options), 20)
    torch.testing.assert_close(column(ddim, "sigma"), column(ddpm, "sigma"))
    half = ddim_schedule(DDIMConfig(**options), 20, eta=0.5)
    torch.testing.assert_close(2 * column(half, "sigma"), column(ddim, "sigma"))


def test_learned_range_lies_between_the_two_fixed_variances():
    small, large, learned = (
        ddpm_schedule(DDPMConfig(variance_type=variance), 10)
        for variance in ("fixed_small", "fixed_large", "learned_range")
    )
    noisy = slice(0, -1)  # timestep 0 adds none
    torch.testing.assert_close(column(learned, "log_variance_min")[noisy], 2 * column(small, "sigma")[noisy].log())
    torch.testing.assert_close(column(learned, "log_variance_max")[noisy], 2 * column(large, "sigma")[noisy].log())
    assert column(learned, "sigma").tolist() == [1] * 9 + [0]
    assert learned.options.variance == "learned_range"


def test_ddpm_goes_to_the_next_timestep_and_ddim_a_fixed_way():
    """Both with 3 of 10 steps by linspace, 9, 4 and 0: DDPM's 9 goes to 4, DDIM's to 9 - 10 // 3 = 6."""
    options = {"num_train_timesteps": 10, "timestep_spacing": "linspace", "prediction_type": "sample"}
    alpha_bar = make_alpha_bar(make_betas(DDPMConfig(**options))).double()
    ddpm, ddim = ddpm_schedule(DDPMConfig(**options), 3), ddim_schedule(DDIMConfig(**options), 3)
    assert ddpm.timesteps.tolist() == ddim.timesteps.tolist() == [9, 4, 0]
    assert column(ddim, "prev_x0")[0].item() == pytest.approx(alpha_bar[6].sqrt().item())
    expected = alpha_bar[4].sqrt() * (1 - alpha_bar[9] / alpha_bar[4]) / (1 - alpha_bar[9])
    assert column(ddpm, "prev_x0")[0].item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_last_alpha_bar_is_one_or_that_of_timestep_zero():
    one = ddim_schedule(DDIMConfig(), 10)
    first = ddim_schedule(DDIMConfig(set_alpha_to_one=False), 10)
    assert column(one, "prev_x0")[-1] == 1
    assert column(first, "prev_x0")[-1].item() == pytest.approx(math.sqrt(1 - 1e-4), rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "draws"),
    [
        (lambda: ddpm_schedule(DDPMConfig(), 3), (True, True, False)),
        (lambda: ddpm_schedule(DDPMConfig(), timesteps=[9, 5]), (True, True)),
        (lambda: ddim_schedule(DDIMConfig(), 3), (False, False, False)),
        (lambda: ddim_schedule(DDIMConfig(), 3, eta=0.1), (True, True, True)),
    ],
    ids=["ddpm", "ddpm-not-to-zero", "ddim", "ddim-eta"],
)
def test_which_steps_draw_noise(schedule, draws):
    assert schedule().draws_noise == draws


def test_schedule_is_a_float32_table():
    schedule = ddim_schedule(DDIMConfig(), 7, eta=0.3)
    assert len(schedule) == 7
    assert (schedule.timesteps.dtype, schedule.rows.dtype) == (torch.int64, torch.float32)
    assert schedule.rows.shape == (7, len(COLUMNS))
    assert schedule.to("meta").rows.device.type == "meta"
    assert schedule.to("meta").timesteps.device.type == "cpu"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, StepOptions(clip_range=1.0)),
        ({"clip_sample_range": 3.0}, StepOptions(clip_range=3.0)),
        ({"clip_sample": False}, StepOptions()),
        (
            {"thresholding": True, "sample_max_value": 2.0},
            StepOptions(threshold_ratio=0.995, threshold_max=2.0),
        ),
        ({"variance_type": "learned"}, StepOptions(clip_range=1.0, variance="learned")),
    ],
    ids=["default", "range", "off", "thresholding-instead-of-clipping", "learned"],
)
def test_what_the_step_is_told(options, expected):
    assert ddpm_schedule(DDPMConfig(**options), 2).options == expected


def test_zero_snr_leaves_no_signal_and_keeps_the_start():
    plain, rescaled = (
        make_alpha_bar(make_betas(DDIMConfig(rescale_betas_zero_snr=rescale))) for rescale in (False, True)
    )
    assert rescaled[-1] == 0
    assert rescaled[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    assert (rescaled[:-1].diff() < 0).all()


@pytest.mark.parametrize("steps", [1, 29, 58, 97, 999, 1000])
def test_trailing_gives_as_many_steps_as_asked(steps):
    """np.arange rounds to one value too many for some, of which diffusers makes timestep -1."""
    for total in (100, 1000):
        timesteps = spaced_timesteps(
            DDIMConfig(num_train_timesteps=total, timestep_spacing="trailing"), min(steps, total)
        )
        assert len(timesteps) == min(steps, total)
        assert timesteps[0] == total - 1
        assert timesteps[-1] >= 0


@given(
    total=st.integers(1, 2000),
    data=st.data(),
    spacing=st.sampled_from(["leading", "trailing", "linspace"]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_timesteps_descend_within_the_training(total, data, spacing):
    steps = data.draw(st.integers(1, total))
    timesteps = spaced_timesteps(DDPMConfig(num_train_timesteps=total, timestep_spacing=spacing), steps)
    assert timesteps.dtype == torch.int64
    assert len(timesteps) == steps
    assert (timesteps.diff() < 0).all()
    assert 0 <= timesteps[-1] <= timesteps[0] < total


REFUSED_CONFIGS = {
    "unknown-prediction": ({"prediction_type": "flow"}, "prediction_type 'flow' is not one of .* use epsilon"),
    "unknown-spacing": ({"timestep_spacing": "karras"}, "timestep_spacing 'karras' .* use leading, trailing"),
    "unknown-betas": ({"beta_schedule": "cosine"}, "beta_schedule 'cosine' is not one of .*squaredcos_cap_v2"),
    "no-training-steps": ({"num_train_timesteps": 0}, "num_train_timesteps is 0; it is 1 or more"),
    "text-for-a-number": ({"num_train_timesteps": "1000"}, "num_train_timesteps is '1000'; it is of type int"),
    "fraction-for-a-whole": ({"steps_offset": 0.5}, "steps_offset is 0.5; it is of type int"),
    "truth-for-a-number": ({"beta_start": True}, "beta_start is True; it is of type float"),
    "number-for-truth": ({"clip_sample": 1}, "clip_sample is 1; it is of type bool"),
    "null": ({"clip_sample_range": None}, "clip_sample_range is None; it is of type float"),
    "negative-beta": ({"beta_start": -0.1}, "beta_start is -0.1; it is from 0 to 1"),
    "nan-beta": ({"beta_end": math.nan}, "beta_end is nan; it is from 0 to 1"),
    "ratio-above-one": ({"dynamic_thresholding_ratio": 1.5}, "dynamic_thresholding_ratio is 1.5; it is from 0 to 1"),
    "too-few-betas": ({"trained_betas": [0.1, 0.2]}, "trained_betas has 2 values for 1000 training steps; give one"),
    "betas-of-text": ({"trained_betas": ["a"]}, "trained_betas is not a list of numbers"),
    "betas-of-a-number": ({"trained_betas": 3}, "trained_betas is not a list of numbers"),
    "unknown-option": ({"clip_smaple": True}, "unknown option clip_smaple"),
}


@pytest.mark.parametrize("config_class", [DDPMConfig, DDIMConfig])
@pytest.mark.parametrize(("options", "message"), REFUSED_CONFIGS.values(), ids=REFUSED_CONFIGS)
def test_a_wrong_option_is_named(config_class, options, message):
    with pytest.raises(InputError, match=message) as error:
        config_class.from_mapping(options)
    assert "\n" not in str(error.value)


REFUSED_BY_ONE = {
    "ddim-sigmoid": (DDIMConfig, {"beta_schedule": "sigmoid"}, "'sigmoid' is not one of DDIMConfig's"),
    "ddim-laplace": (DDIMConfig, {"beta_schedule": "laplace"}, "'laplace' is not one of DDIMConfig's"),
    "ddpm-variance": (DDPMConfig, {"variance_type": "small"}, "variance_type 'small' is not one of .* fixed_small"),
}


@pytest.mark.parametrize(("config_class", "options", "message"), REFUSED_BY_ONE.values(), ids=REFUSED_BY_ONE)
def test_an_option_of_the_other_scheduler_is_named(config_class, options, message):
    with pytest.raises(InputError, match=message):
        config_class(**options)


ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
REFUSED_RUNS = {
    "no-steps": ({}, {"num_inference_steps": 0}, "num_inference_steps is 0; it is from 1 to the 1000"),
    "more-steps-than-trained": ({}, {"num_inference_steps": 1001}, "num_inference_steps is 1001; it is from 1 to"),
    "half-a-step": ({}, {"num_inference_steps": 2.5}, "num_inference_steps is 2.5; it is a whole number"),
    "offset-past-the-end": ({"steps_offset": 1}, {"num_inference_steps": 1000}, "steps_offset 1 moves 1000 steps"),
    "offset-below-zero": ({"steps_offset": -1}, {"num_inference_steps": 10}, "steps_offset -1 .* timesteps -1 to 899"),
    "epsilon-without-signal": (
        ZERO_SNR | {"clip_sample": False},
        {"num_inference_steps": 5},
        "prediction_type epsilon divides by the signal, of which none is left at timestep 999; use v_prediction",
    ),
    "thresholded-epsilon-without-signal": (
        ZERO_SNR | {"thresholding": True},
        {"num_inference_steps": 5},
        "prediction_type epsilon divides by the signal",
    ),
    "trained-epsilon-without-signal": (
        {"trained_betas": [0.01] * 999 + [1.0], "clip_sample": False},
        {"num_inference_steps": 1000},
        "prediction_type epsilon divides by the signal",
    ),
    "no-noise-to-remove": ({"beta_start": 0.0}, {"num_inference_steps": 10}, "no step at timestep 0, where alpha_bar"),
    "no-signal-before-the-end": (
        {"trained_betas": [0.1] * 500 + [1.0] * 500, "prediction_type": "sample"},
        {"num_inference_steps": 1000},
        "no step at timestep 999, where alpha_bar is 0",
    ),
}


@pytest.mark.parametrize("sampler", [(DDPMConfig, ddpm_schedule), (DDIMConfig, ddim_schedule)], ids=["ddpm", "ddim"])
@pytest.mark.parametrize(("options", "run", "message"), REFUSED_RUNS.values(), ids=REFUSED_RUNS)
def test_a_run_that_cannot_be_is_refused(sampler, options, run, message):
    config_class, make_schedule = sampler
    with pytest.raises(InputError, match=message) as error:
        make_schedule(config_class(**options), **run)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("eta", [-0.1, math.nan, math.inf])
def test_eta_out_of_range(eta):
    with pytest.raises(InputError, match=r"eta is .*; it is from 0"):
        ddim_schedule(DDIMConfig(), 10, eta=eta)


def test_eta_with_more_noise_than_there_is():
    with pytest.raises(InputError, match=r"eta is 5\.0, more noise than the next timestep has; use eta from 0 to 1"):
        ddim_schedule(DDIMConfig(), 10, eta=5.0)


def test_fixed_large_log_is_refused():
    with pytest.raises(InputError, match=r"variance_type fixed_large_log .* use fixed_large"):
        ddpm_schedule(DDPMConfig(variance_type="fixed_large_log"), 10)


REFUSED_TIMESTEPS = {
    "empty": ([], "at least one"),
    "fractions": ([2.0, 1.0], "whole numbers"),
    "ascending": ([1, 2], "do not descend"),
    "repeated": ([5, 5, 1], "do not descend"),
    "past-the-training": ([1000, 3], "timesteps 1000 to 3 leave the training's 999 to 0"),
    "negative": ([3, -1], "timesteps 3 to -1 leave"),
    "nested": ([[3, 1]], "not a list"),
}


@pytest.mark.parametrize(("timesteps", "message"), REFUSED_TIMESTEPS.values(), ids=REFUSED_TIMESTEPS)
def test_custom_timesteps_that_cannot_be(timesteps, message):
    with pytest.raises(InputError, match=message):
        ddpm_schedule(DDPMConfig(), timesteps=timesteps)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_custom_timesteps_of_any_kind(kind):
    assert custom_timesteps(DDPMConfig(), kind([7, 3, 1])).tolist() == [7, 3, 1]


@pytest.mark.parametrize("given", [{}, {"num_inference_steps": 5, "timesteps": [3]}], ids=["neither", "both"])
def test_either_steps_or_timesteps(given):
    with pytest.raises(InputError, match="either num_inference_steps or timesteps"):
        ddpm_schedule(DDPMConfig(), **given)


def test_zero_snr_runs_where_no_step_divides_by_the_signal():
    options = {"rescale_betas_zero_snr": True}
    assert ddim_schedule(DDIMConfig(**options), 50).rows.isfinite().all()  # leading: the last timestep is not used
    for prediction in ("sample", "v_prediction"):
        for eta in (0.0, 1.0):
            config = DDIMConfig(**ZERO_SNR, prediction_type=prediction)
            assert ddim_schedule(config, 50, eta=eta).rows.isfinite().all()


def test_trained_betas_replace_any_beta_schedule():
    betas = np.linspace(0.01, 0.3, 12)
    config = DDIMConfig(num_train_timesteps=12, beta_schedule="sigmoid", trained_betas=betas)
    assert torch.equal(make_betas(config), torch.tensor(betas, dtype=torch.float32))
    assert config == DDIMConfig(num_train_timesteps=12, beta_schedule="sigmoid", trained_betas=betas.tolist())
    assert hash(config)


def test_eta_one_from_pure_noise_is_never_the_root_of_a_rounding():
    """sigma^2 is the next timestep's variance; rounded it is more for half of these, where diffusers has NaN."""
    config = DDIMConfig(**ZERO_SNR, prediction_type="v_prediction")
    for steps in range(1, 200):
        assert ddim_schedule(config, steps, eta=1.0).rows.isfinite().all()

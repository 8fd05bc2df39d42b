"""A schedule: its table, the options of its steps, and undefined runs."""

import pytest
import torch

from fastdiff import DDIMScheduler, DDPMScheduler
from fastdiff.errors import InputError
from fastdiff.kernels.denoise import COLUMNS, StepOptions


@pytest.mark.parametrize(
    ("schedule", "draws"),
    [
        (lambda: DDPMScheduler().schedule(3), (True, True, False)),
        (lambda: DDPMScheduler(steps_offset=1).schedule(3), (True, True, True)),
        (lambda: DDIMScheduler().schedule(3), (False, False, False)),
        (lambda: DDIMScheduler().schedule(3, eta=0.1), (True, True, True)),
    ],
    ids=["ddpm", "ddpm-not-to-zero", "ddim", "ddim-eta"],
)
def test_which_steps_draw_noise(schedule, draws):
    assert schedule().draws_noise == draws


def test_schedule_is_a_float32_table():
    schedule = DDIMScheduler().schedule(7, eta=0.3)
    assert len(schedule) == 7
    assert (schedule.timesteps.dtype, schedule.rows.dtype) == (torch.int64, torch.float32)
    assert schedule.rows.shape == (7, len(COLUMNS))
    assert schedule.to("meta").rows.device.type == "meta"
    assert schedule.to("meta").timesteps.device.type == "cpu"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (StepOptions(), 1)),
        ({"clip_sample_range": 3.0}, (StepOptions(), 3)),
        ({"clip_sample": False}, (StepOptions(), 0)),
        (
            {"thresholding": True, "sample_max_value": 2.0},
            (StepOptions(threshold_ratio=0.995, threshold_max=2.0), 0),
        ),
        ({"variance_type": "learned"}, (StepOptions(variance="learned"), 1)),
    ],
    ids=["default", "range", "off", "thresholding-instead-of-clipping", "learned"],
)
def test_what_the_step_is_told(options, expected):
    schedule = DDPMScheduler(**options).schedule(2)
    assert (schedule.options, *schedule.rows[:, COLUMNS.index("clip_range")].unique()) == expected


ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


REFUSED_RUNS = {
    "no-steps": ({}, {"num_inference_steps": 0}, "num_inference_steps is 0; it must be from 1 to the 1000"),
    "more-steps-than-trained": ({}, {"num_inference_steps": 1001}, "num_inference_steps is 1001; it must be from 1"),
    "half-a-step": ({}, {"num_inference_steps": 2.5}, "num_inference_steps is 2.5; it must be a whole number"),
    "offset-past-the-end": ({"steps_offset": 1}, {"num_inference_steps": 1000}, "steps_offset 1 moves 1000 steps"),
    "offset-below-zero": ({"steps_offset": -1}, {"num_inference_steps": 10}, "steps_offset -1 .* timesteps -1 to 899"),
    "epsilon-without-signal": (
        ZERO_SNR | {"clip_sample": False},
        {"num_inference_steps": 5},
        "prediction_type epsilon divides by the signal, which is zero at timestep 999; use v_prediction",
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


@pytest.mark.parametrize("kind", [DDPMScheduler, DDIMScheduler], ids=["ddpm", "ddim"])
@pytest.mark.parametrize(("options", "run", "message"), REFUSED_RUNS.values(), ids=REFUSED_RUNS)
def test_a_run_that_cannot_be_is_refused(kind, options, run, message):
    with pytest.raises(InputError, match=message) as error:
        kind(**options).schedule(**run)
    assert "\n" not in str(error.value)


def test_zero_snr_runs_where_no_step_divides_by_the_signal():
    options = {"rescale_betas_zero_snr": True}
    assert DDIMScheduler(**options).schedule(50).rows.isfinite().all()  # leading: the last timestep is not used
    for prediction in ("sample", "v_prediction"):
        for eta in (0.0, 1.0):
            ddim = DDIMScheduler(**ZERO_SNR, prediction_type=prediction)
            assert ddim.schedule(50, eta=eta).rows.isfinite().all()

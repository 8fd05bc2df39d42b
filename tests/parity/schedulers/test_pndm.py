"""PNDM that begins with Runge-Kutta steps, against diffusers' own."""

import pytest
import torch

import fastdiff
from fastdiff.errors import InputError
from fastdiff.kernels.denoise import COLUMNS
from tests.parity.schedulers.loops import STABLE_DIFFUSION, TOLERANCE, assert_loops_agree, network, pair, randn

OPTIONS = {
    "defaults": {},
    "stable-diffusion": {**STABLE_DIFFUSION, "steps_offset": 1, "timestep_spacing": "leading"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "trained-betas": {"num_train_timesteps": 60, "trained_betas": torch.linspace(0.001, 0.2, 60).tolist()},
    "velocity": {**STABLE_DIFFUSION, "prediction_type": "v_prediction"},
    "trailing": {**STABLE_DIFFUSION, "timestep_spacing": "trailing", "prediction_type": "v_prediction"},
    "linspace": {**STABLE_DIFFUSION, "timestep_spacing": "linspace"},
    "alpha-of-one": {**STABLE_DIFFUSION, "set_alpha_to_one": True},
}
EACH = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def both(options, steps):
    schedulers = pair("PNDMScheduler", {**options, "skip_prk_steps": False})
    for scheduler in schedulers:
        scheduler.set_timesteps(steps)
    return schedulers


@EACH
@pytest.mark.parametrize("steps", [4, 5, 20, 50])
def test_whole_loop(options, steps):
    theirs, ours = both(options, steps)
    assert ours.timesteps.dtype == theirs.timesteps.dtype
    assert torch.equal(ours.timesteps, theirs.timesteps) and len(ours.timesteps) == steps + 9
    assert ours.num_inference_steps == theirs.num_inference_steps
    assert_loops_agree(theirs, ours)


@EACH
def test_the_schedule_is_the_scheduler(options):
    _, ours = both(options, 7)
    schedule = ours.schedule(7)
    assert torch.equal(schedule.timesteps, ours.timesteps)
    assert torch.equal(schedule.rows, ours._complete_table(0))
    keeps = schedule.rows[:, COLUMNS.index("keeps_output")].tolist()
    assert keeps == [1, 0, 0, 0] * 3 + [1] * 4


@pytest.mark.parametrize("begin", [3, 4, 12, 14])
def test_a_loop_may_begin_in_the_middle(begin):
    """diffusers counts the calls from its first one. Its Runge-Kutta steps begin at the run's, wherever a loop does."""
    theirs, ours = both(STABLE_DIFFUSION, 10)
    ours.set_begin_index(begin)
    assert_loops_agree(theirs, ours, begin=begin)


def test_half_precision_is_stepped_in_float32():
    theirs, ours = both(STABLE_DIFFUSION, 5)
    sample = randn(2, 3, 8, 8).half()
    for t in theirs.timesteps[:4]:
        output = network(sample, t)
        expected, actual = (scheduler.step(output, t, sample).prev_sample for scheduler in (theirs, ours))
        assert actual.dtype == expected.dtype == torch.float16
        assert (actual - expected).abs().max() <= 5e-3 * expected.abs().max()
        sample = actual


def test_a_run_of_few_steps_is_refused():
    with pytest.raises(InputError, match="num_inference_steps is 3; Runge-Kutta steps need 4 or more, or set skip_prk"):
        fastdiff.PNDMScheduler().set_timesteps(3)
    fastdiff.PNDMScheduler(skip_prk_steps=True).set_timesteps(3)


def test_the_first_step_has_the_paper_s_weights():
    """With outputs of 6 from one call and 0 from the others, a step is a sixth or a third of one with outputs of 1."""
    results = []
    for outputs in ((1, 1, 1, 1), (6, 0, 0, 0), (0, 6, 0, 0), (0, 0, 6, 0), (0, 0, 0, 6)):
        ours = fastdiff.PNDMScheduler()
        ours.set_timesteps(10)
        sample = torch.zeros(1, 1, 2, 2)
        for t, value in zip(ours.timesteps, outputs, strict=False):
            sample = ours.step(torch.full((1, 1, 2, 2), float(value)), t, sample).prev_sample
        results.append(sample.mean().item())
    whole, *shares = results
    for share, times in zip(shares, (1, 2, 2, 1), strict=True):
        assert share == pytest.approx(times * whole, rel=TOLERANCE)

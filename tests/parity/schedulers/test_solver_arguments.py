"""Arguments of the solvers DEIS, DPM-Solver and DPM2, against diffusers' own, and refused arguments."""

import diffusers
import pytest
import torch

import fastdiff
from fastdiff.errors import InputError
from tests.parity.schedulers.loops import STABLE_DIFFUSION, TOLERANCE, assert_loops_agree, pair, randn

# diffusers passes tensors to numpy
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword", "ignore:__array_wrap__ must accept context"
)
FLOW = {"use_flow_sigmas": True, "use_dynamic_shifting": True, "prediction_type": "flow_prediction"}


@pytest.mark.parametrize(
    "kind", ["DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "DEISMultistepScheduler"]
)
def test_a_dynamic_shift_of_a_flow(kind):
    theirs, ours = pair(kind, FLOW)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(6, mu=1.15)
    assert torch.equal(ours.timesteps, theirs.timesteps) and torch.equal(ours.sigmas, theirs.sigmas)
    picture, noise = randn(2, 3, 8, 8), randn(2, 3, 8, 8, seed=1)
    noisy = [each.add_noise(picture, noise, each.timesteps[[4, 2]]) for each in (theirs, ours)]
    torch.testing.assert_close(noisy[1], noisy[0], rtol=1e-6, atol=1e-6)
    assert_loops_agree(theirs, ours, dtype=torch.float64)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("begin", [0, 1, 2, 4])
def test_singlestep_over_custom_timesteps_beginning_within_a_step(order, begin):
    options = {**STABLE_DIFFUSION, "solver_order": order, "final_sigmas_type": "sigma_min"}
    theirs, ours = pair("DPMSolverSinglestepScheduler", options)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(timesteps=[901, 655, 455, 270, 133, 3])
        scheduler.set_begin_index(begin)
    assert torch.equal(ours.timesteps, theirs.timesteps) and torch.equal(ours.sigmas, theirs.sigmas)
    assert_loops_agree(theirs, ours, begin=begin, dtype=torch.float64)


def test_singlestep_of_a_learned_variance():
    theirs, ours = pair("DPMSolverSinglestepScheduler", {"variance_type": "learned_range"})
    steps = []
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(5)
        sample, output = randn(2, 3, 8, 8), randn(2, 6, 8, 8, seed=1)
        steps.append(scheduler.step(output, scheduler.timesteps[0], sample).prev_sample)
    assert (steps[1] - steps[0]).abs().max() <= TOLERANCE * steps[0].abs().max()


CONVERTED = {
    "deis-to-dpm": ("DEISMultistepScheduler", "DPMSolverMultistepScheduler"),
    "dpm-to-deis": ("DPMSolverMultistepScheduler", "DEISMultistepScheduler"),
    "deis-to-singlestep": ("DEISMultistepScheduler", "DPMSolverSinglestepScheduler"),
    "singlestep-to-deis": ("DPMSolverSinglestepScheduler", "DEISMultistepScheduler"),
}


@pytest.mark.parametrize(("source", "target"), CONVERTED.values(), ids=CONVERTED)
def test_the_values_of_another_solver_become_the_solvers_own(source, target):
    of_another = {"solver_type": "bh2", "algorithm_type": "dpmsolver++", "final_sigmas_type": "sigma_min"}
    config = getattr(diffusers, source).from_config(of_another).config
    theirs, ours = (getattr(library, target).from_config(config) for library in (diffusers, fastdiff))
    assert all(ours.config[name] == theirs.config[name] for name in ("solver_type", "algorithm_type"))


def test_an_option_left_at_its_default_does_not_pass_through_a_scheduler_without_it():
    """DDIM's default clip_sample is not LCM's."""
    for library in (diffusers, fastdiff):
        between = library.EulerDiscreteScheduler.from_config(library.DDIMScheduler().config)
        assert not library.LCMScheduler.from_config(between.config).config["clip_sample"]


def begun_at(index, kind):
    ours = getattr(fastdiff, kind)()
    ours.set_timesteps(5)
    ours.set_begin_index(index)
    ours.step(randn(1, 3, 4, 4), ours.timesteps[index], randn(1, 3, 4, 4))


REFUSED = {
    "solver-on-eps-to-zero": (
        lambda: fastdiff.DPMSolverMultistepScheduler(algorithm_type="dpmsolver"),
        "algorithm_type dpmsolver cannot step to sigma zero; use final_sigmas_type sigma_min",
    ),
    "solver-on-eps-of-a-flow": (
        lambda: fastdiff.DPMSolverSinglestepScheduler(
            algorithm_type="dpmsolver", final_sigmas_type="sigma_min", prediction_type="flow_prediction"
        ),
        r"algorithm_type dpmsolver has no prediction_type flow_prediction; use dpmsolver\+\+",
    ),
    "sde-on-eps-of-third-order": (
        lambda: fastdiff.DPMSolverMultistepScheduler(
            algorithm_type="sde-dpmsolver", final_sigmas_type="sigma_min", solver_order=3
        ),
        "algorithm_type sde-dpmsolver has no solver_order 3; use 1 or 2",
    ),
    "flow-and-karras": (
        lambda: fastdiff.DEISMultistepScheduler(use_flow_sigmas=True, use_karras_sigmas=True),
        "use_flow_sigmas excludes karras sigmas; choose one of the two",
    ),
    "flow-and-lu": (
        lambda: fastdiff.DPMSolverMultistepScheduler(use_flow_sigmas=True, use_lu_lambdas=True),
        "use_flow_sigmas excludes lu sigmas",
    ),
    "flow-of-one-training-step": (
        lambda: fastdiff.DEISMultistepScheduler(num_train_timesteps=1, use_flow_sigmas=True).schedule(1),
        "step 1 of 1 is undefined at sigma 0",
    ),
    "flow-that-goes-back": (
        lambda: fastdiff.DPMSolverMultistepScheduler(
            num_train_timesteps=100,
            use_flow_sigmas=True,
            algorithm_type="sde-dpmsolver++",
            final_sigmas_type="sigma_min",
        ).schedule(100),
        "step 100 of 100 is undefined at sigma 0.0099",
    ),
    "dpm2-sample": (
        lambda: fastdiff.KDPM2DiscreteScheduler(prediction_type="sample"),
        "prediction_type: 'sample' is not one of epsilon, v_prediction",
    ),
    "dpm2-beginning-with-a-second-call": (
        lambda: begun_at(3, "KDPM2DiscreteScheduler"),
        "a loop cannot begin at index 3, the second call of a step; use an even index",
    ),
    "dpm2-other-training": (
        lambda: fastdiff.KDPM2AncestralDiscreteScheduler().set_timesteps(5, num_train_timesteps=500),
        "num_train_timesteps: the config has 1000",
    ),
    "deis-repeated-timesteps": (
        lambda: fastdiff.DEISMultistepScheduler(num_train_timesteps=10).schedule(10),
        "repeats a timestep; use fewer steps",
    ),
    "singlestep-repeated-timesteps": (
        lambda: fastdiff.DPMSolverSinglestepScheduler(num_train_timesteps=8, solver_order=3).schedule(8),
        "repeats a timestep; use fewer steps",
    ),
    "singlestep-spacing": (
        lambda: fastdiff.DPMSolverSinglestepScheduler(timestep_spacing="trailing"),
        "DPMSolverSinglestepScheduler has no timestep_spacing; leave it out",
    ),
    "mu-of-any-size": (
        lambda: fastdiff.DEISMultistepScheduler(use_dynamic_shifting=True, use_flow_sigmas=True).set_timesteps(
            5, mu=1e9
        ),
        "mu: 1000000000.0 is not a number from -20 to 20",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)

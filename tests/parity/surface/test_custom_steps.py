"""Custom `timesteps` and `sigmas` of runs: loops against diffusers, the table of `schedule`, and refusals."""

import inspect

import diffusers
import numpy as np
import pytest
import torch

import fastdiff
from fastdiff.errors import InputError
from fastdiff.sampler_names import SAMPLERS
from tests.parity.schedulers.loops import STABLE_DIFFUSION, assert_loops_agree, pair

# diffusers passes tensors to numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")

WHOLE = [999, 850, 736, 645, 545, 455, 343, 233, 124, 24]  # diffusers' AysSchedules["StableDiffusionTimesteps"]
FRACTIONS = [901, 455.5, 70, 3]
SIGMAS = [14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029, 0.0]
CASES = {
    "ddpm": ("DDPMScheduler", {}, {"timesteps": WHOLE}),
    "ddpm-clipped": ("DDPMScheduler", {"clip_sample_range": 0.7}, {"timesteps": [900, 500, 1]}),
    "euler": ("EulerDiscreteScheduler", STABLE_DIFFUSION, {"timesteps": WHOLE}),
    "euler-fractions": ("EulerDiscreteScheduler", STABLE_DIFFUSION, {"timesteps": FRACTIONS}),
    "euler-sigmas": ("EulerDiscreteScheduler", STABLE_DIFFUSION, {"sigmas": SIGMAS}),
    "euler-sigmas-beside-karras": (
        "EulerDiscreteScheduler",
        {**STABLE_DIFFUSION, "use_karras_sigmas": True},
        {"sigmas": SIGMAS[:-1]},
    ),
    "heun": ("HeunDiscreteScheduler", STABLE_DIFFUSION, {"timesteps": FRACTIONS}),
    "dpm": ("DPMSolverMultistepScheduler", STABLE_DIFFUSION, {"timesteps": WHOLE}),
    "dpm-sde": (
        "DPMSolverMultistepScheduler",
        {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++"},
        {"timesteps": WHOLE},
    ),
    "lcm": ("LCMScheduler", {}, {"timesteps": [999, 639, 300]}),
    "tcd": ("TCDScheduler", {}, {"timesteps": [999, 639, 300]}),
}
KINDS = {"list": list, "array": np.array, "tensor": torch.tensor}


@pytest.mark.parametrize(("kind", "options", "choice"), CASES.values(), ids=CASES)
def test_loop_over_custom_steps(kind, options, choice):
    theirs, ours = pair(kind, options)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(**choice)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    if hasattr(theirs, "sigmas"):
        assert torch.equal(ours.sigmas, theirs.sigmas)
    wide = kind == "HeunDiscreteScheduler"  # see tolerance_of in test_counted_schedulers.py
    assert_loops_agree(theirs, ours, dtype=torch.float64 if wide else torch.float32)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("kind", "options", "choice"), CASES.values(), ids=CASES)
def test_the_schedule_of_custom_steps_is_the_scheduler(kind, options, choice, make):
    _, ours = pair(kind, options)
    ((name, values),) = choice.items()
    schedule = ours.schedule(**{name: make(values)})
    assert ours.num_inference_steps is None
    ours.set_timesteps(**{name: values})
    assert torch.equal(schedule.timesteps, ours.timesteps)
    assert schedule.init_noise_sigma == float(ours.init_noise_sigma)
    assert torch.equal(schedule.rows, ours._table_of_loop().rows)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_set_timesteps_has_the_arguments_of_diffusers(kind):
    theirs, ours = (
        {name: (place, each.default) for place, (name, each) in enumerate(parameters.items())}
        for parameters in (
            inspect.signature(getattr(library, kind).set_timesteps).parameters for library in (diffusers, fastdiff)
        )
    )
    assert theirs.keys() == ours.keys()
    for name, said in theirs.items():
        assert ours[name] == said or name == "num_inference_steps", name


@pytest.mark.parametrize("name", ["timesteps", "sigmas"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_scheduler_without_custom_steps_says_which_have_them(kind, name):
    ours = getattr(fastdiff, kind)
    if name in inspect.signature(getattr(diffusers, kind).set_timesteps).parameters:
        pytest.skip("has them")
    needed = {"skip_prk_steps": True} if kind == "PNDMScheduler" else {}
    with pytest.raises(InputError, match=f"{name}: {kind} does not support custom {name}; use .*euler"):
        ours(**needed).schedule(**{name: [5, 3]})


EULER, HEUN, DPM = (
    getattr(fastdiff, f"{name}Scheduler") for name in ("EulerDiscrete", "HeunDiscrete", "DPMSolverMultistep")
)
REFUSED = {
    "nothing": (EULER, {}, "give one of num_inference_steps, timesteps and sigmas"),
    "two": (EULER, {"timesteps": [3], "sigmas": [3.0, 0.0]}, "give one of num_inference_steps, timesteps and sigmas"),
    "two-of-a-flow": (
        fastdiff.FlowMatchEulerDiscreteScheduler,
        {"timesteps": [500.0], "sigmas": [0.5]},
        "give one of num_inference_steps, timesteps and sigmas",
    ),
    "a-number-too": (EULER, {"num_inference_steps": 1, "timesteps": [3]}, "give one of num_inference_steps"),
    "ascending": (EULER, {"timesteps": [3, 5]}, "timesteps do not descend; give each once"),
    "repeated": (HEUN, {"timesteps": [5.5, 5.5]}, "timesteps do not descend"),
    "past-the-training": (HEUN, {"timesteps": [1000, 5]}, "timesteps 1000 to 5 are outside the training's 999 to 0"),
    "negative": (EULER, {"timesteps": [5, -1]}, "timesteps 5 to -1 are outside the training's 999 to 0"),
    "negative-sigma": (EULER, {"sigmas": [5, -1]}, "sigmas 5 to -1 are outside their range"),
    "ascending-sigmas": (EULER, {"sigmas": [0.0, 5.0]}, "sigmas do not descend"),
    "one-sigma": (EULER, {"sigmas": [5]}, "sigmas: 1 given; give at least 2"),
    "none": (EULER, {"timesteps": []}, "timesteps: 0 given; give at least 1"),
    "words": (EULER, {"timesteps": "trailing"}, "timesteps: 'trailing' is not a list"),
    "a-number": (EULER, {"sigmas": 5.0}, "sigmas: 5.0 is not a list"),
    "infinite": (EULER, {"sigmas": [float("inf"), 0.0]}, "sigmas: .* is not a list"),
    "fractions": (DPM, {"timesteps": [5.5, 3]}, "timesteps is not a list of whole numbers"),
    "of-karras": (DPM.from_config({}, use_karras_sigmas=True), {"timesteps": [5]}, "allow no custom ones"),
    "mu": (fastdiff.DDIMScheduler, {"num_inference_steps": 5, "mu": 1.0}, "mu: DDIMScheduler does not support mu; use"),
}


@pytest.mark.parametrize(("scheduler", "choice", "message"), REFUSED.values(), ids=REFUSED)
def test_custom_steps_that_cannot_be_are_refused(scheduler, choice, message):
    ours = scheduler() if isinstance(scheduler, type) else scheduler
    with pytest.raises(InputError, match=message) as error:
        ours.schedule(**choice)
    assert "\n" not in str(error.value)

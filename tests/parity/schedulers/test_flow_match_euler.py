"""FlowMatchEulerDiscreteScheduler against diffusers' own, in bits, and what it refuses."""

import diffusers
import numpy as np
import pytest
import torch

import fastdiff
from fastdiff import Pipeline
from fastdiff.errors import InputError
from tests.parity.schedulers.loops import network, randn

pytestmark = [  # diffusers passes tensors to numpy, and divides by a timestep of 0
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
KIND = "FlowMatchEulerDiscreteScheduler"
DYNAMIC = {"use_dynamic_shifting": True}
EVEN = np.linspace(1.0, 0.1, 10)
TIMES = [1000.0, 700.0, 300.0, 1.0]
CASES = {  # options, and how a run is chosen
    "defaults": ({}, {}),
    "trained-on-60": ({"num_train_timesteps": 60}, {}),
    "shift": ({"shift": 3.0}, {}),
    "dynamic": (DYNAMIC, {"mu": 1.15}),
    "dynamic-linear": ({**DYNAMIC, "time_shift_type": "linear"}, {"mu": 1.15}),
    "terminal": ({**DYNAMIC, "shift_terminal": 0.1}, {"mu": 0.7}),
    "karras": ({"use_karras_sigmas": True, "shift": 2.0, "shift_terminal": 0.1}, {}),
    "exponential": ({"use_exponential_sigmas": True}, {}),
    "beta": ({"use_beta_sigmas": True}, {}),
    "inverted": ({"invert_sigmas": True}, {}),
    "stochastic": ({"stochastic_sampling": True, "shift": 3.0}, {}),
    "mu-is-not-read": ({}, {"mu": 2.0}),
    "sigmas": ({"shift": 3.0}, {"sigmas": EVEN}),
    "dynamic-sigmas": (DYNAMIC, {"sigmas": EVEN.tolist(), "mu": 0.5}),
    "sigmas-to-zero": (DYNAMIC, {"sigmas": [1.0, 0.5, 0.0], "mu": 0.5}),
    "timesteps": ({"shift": 3.0}, {"timesteps": torch.tensor(TIMES)}),
    "inverted-timesteps": ({"invert_sigmas": True, "stochastic_sampling": True}, {"timesteps": TIMES}),
    "both": ({}, {"timesteps": TIMES, "sigmas": [1.0, 0.8, 0.5, 0.2]}),
    "all-three": ({}, {"num_inference_steps": 4, "timesteps": TIMES, "sigmas": [1.0, 0.8, 0.5, 0.2]}),
}
EACH = pytest.mark.parametrize(("options", "choice"), CASES.values(), ids=CASES)


def steps_of(options, choice):
    """Return the numbers of steps to test. A stretched run of one step divides by zero, also in diffusers."""
    if "sigmas" in choice or "timesteps" in choice:
        return [choice.get("num_inference_steps")]
    return [2, 5, 20, 50] if "shift_terminal" in options else [1, 2, 5, 20, 50]


def both(options, choice):
    schedulers = getattr(diffusers, KIND)(**options), getattr(fastdiff, KIND)(**options)
    for scheduler in schedulers:
        scheduler.set_timesteps(**choice)
    return schedulers


def loop(scheduler, begin=0, dtype=torch.float32):
    generator, sample = torch.Generator().manual_seed(0), randn(2, 3, 8, 8, seed=1).to(dtype)
    pictures = []
    for t in scheduler.timesteps[begin:]:
        sample = scheduler.step(network(sample, t).to(dtype), t, sample, generator=generator).prev_sample
        pictures.append(sample)
    return *pictures, generator.get_state()


@EACH
def test_whole_loop(options, choice):
    for steps in steps_of(options, choice):
        theirs, ours = both(options, {**choice, "num_inference_steps": steps})
        for name in ("timesteps", "sigmas"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert ours.num_inference_steps == theirs.num_inference_steps
        for picture, other in zip(loop(ours), loop(theirs), strict=True):
            assert torch.equal(picture, other)


@EACH
def test_the_schedule_is_the_scheduler(options, choice):
    if len(choice.keys() - {"mu"}) > 1:
        pytest.skip("a pipeline chooses in one way")
    chosen = choice if choice.keys() - {"mu"} else {**choice, "num_inference_steps": 7}
    if not options.get("use_dynamic_shifting"):
        chosen = {name: value for name, value in chosen.items() if name != "mu"}
    _, ours = both(options, chosen)
    schedule = getattr(fastdiff, KIND)(**options).schedule(**chosen)
    assert torch.equal(schedule.timesteps, ours.timesteps)
    assert torch.equal(schedule.rows, ours._complete_table(0))
    assert schedule.draws_noise == (bool(options.get("stochastic_sampling")),) * len(schedule)


def test_attributes_before_a_run():
    for options in ({}, {"shift": 3.0}, {**DYNAMIC, "shift": 3.0}):
        theirs, ours = getattr(diffusers, KIND)(**options), getattr(fastdiff, KIND)(**options)
        assert torch.equal(ours.timesteps, theirs.timesteps) and torch.equal(ours.sigmas, theirs.sigmas)
        for name in ("shift", "sigma_min", "sigma_max", "order", "begin_index", "step_index"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert {key: ours.config[key] for key in theirs.config if key[0] != "_"}.items() <= theirs.config.items()
        assert not {"beta_start", "prediction_type"} & ours.config.keys()


def test_a_shift_set_later_moves_later_runs():
    theirs, ours = getattr(diffusers, KIND)(), getattr(fastdiff, KIND)()
    for scheduler in (theirs, ours):
        scheduler.set_shift(5.0)
        scheduler.sigma_min = 0.0  # as pipelines of some models do
        scheduler.set_timesteps(8)
    assert ours.shift == 5.0 and torch.equal(ours.sigmas, theirs.sigmas)
    assert torch.equal(ours.time_shift(0.4, 2.0, ours.sigmas[:3]), theirs.time_shift(0.4, 2.0, theirs.sigmas[:3]))


def test_a_stretch_ends_at_shift_terminal():
    theirs, ours = (getattr(library, KIND)(shift_terminal=0.2) for library in (diffusers, fastdiff))
    times = torch.linspace(1, 0.02, 6)
    assert torch.equal(ours.stretch_shift_to_terminal(times), theirs.stretch_shift_to_terminal(times))
    assert ours.stretch_shift_to_terminal(times)[-1].item() == pytest.approx(0.2)


@pytest.mark.parametrize("set_begin", [False, True], ids=["by-timestep", "by-index"])
def test_a_loop_may_begin_in_the_middle_of_noise_from_scale_noise(set_begin):
    theirs, ours = both({"shift": 3.0}, {"num_inference_steps": 10})
    picture, noise = randn(2, 3, 8, 8), randn(2, 3, 8, 8, seed=1)
    for scheduler in (theirs, ours):
        if set_begin:
            scheduler.set_begin_index(4)
    noisy = [each.scale_noise(picture, each.timesteps[[4, 4]], noise) for each in (theirs, ours)]
    assert torch.equal(*noisy)
    for one, other in zip(loop(ours, begin=4), loop(theirs, begin=4), strict=True):
        assert torch.equal(one, other)


def test_half_precision_is_stepped_in_float32():
    theirs, ours = both({}, {"num_inference_steps": 5})
    for one, other in zip(loop(ours, dtype=torch.float16), loop(theirs, dtype=torch.float16), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"stochastic_sampling": True}], ids=["velocity", "stochastic"])
def test_tokens_with_timesteps_of_their_own(options):
    theirs, ours = both(options, {"num_inference_steps": 8})
    sample, output = randn(2, 5, 4), randn(2, 5, 4, seed=1)
    times = torch.tensor([[1000.0, 880.0, 500.0, 100.0, 2.0], [0.0, 999.0, 750.0, 625.5, 1.0]])
    results = []
    for scheduler in (theirs, ours):
        generator = torch.Generator().manual_seed(2)
        step = scheduler.step(
            output, scheduler.timesteps[0], sample, generator=generator, per_token_timesteps=times, return_dict=False
        )
        assert len(step) == 1 and scheduler.step_index == 1
        results.append(step[0])
    assert torch.equal(*results)


def flow(**options):
    return getattr(fastdiff, KIND)(**options)


REFUSED = {
    "no-mu": (lambda: flow(**DYNAMIC).schedule(5), "mu is None; give the shift that use_dynamic_shifting needs"),
    "huge-mu": (lambda: flow(**DYNAMIC).schedule(5, mu=1e6), "mu: 1000000.0 is not a number from -20 to 20"),
    "linear-mu": (lambda: flow(**DYNAMIC, time_shift_type="linear").schedule(5, mu=0.0), "mu: 0.0 is not a number gre"),
    "no-steps": (lambda: flow().set_timesteps(), "give num_inference_steps, sigmas or timesteps"),
    "lengths": (
        lambda: flow().set_timesteps(3, sigmas=[1.0, 0.5]),
        r"sigmas \(2\) and num_inference_steps \(3\) differ",
    ),
    "above-one": (lambda: flow().schedule(sigmas=[1.5, 0.5]), "sigmas 1.5 to 0.5 are outside"),
    "ascending": (lambda: flow().schedule(sigmas=[0.5, 0.9]), "sigmas do not descend"),
    "past-the-training": (lambda: flow().schedule(timesteps=[1001, 3]), "timesteps 1001 to 3 are outside"),
    "one-stretched-step": (lambda: flow(shift_terminal=0.1).schedule(1), "sigmas that are not finite"),
    "exponential-to-zero": (
        lambda: flow(use_exponential_sigmas=True).schedule(sigmas=[1.0, 0.0]),
        "takes the logarithm of sigma 0",
    ),
    "two-spacings": (lambda: flow(use_karras_sigmas=True, use_beta_sigmas=True), "exclude each other; choose one"),
    "shift": (lambda: flow(shift=0.0), "shift: 0.0 is not a number greater than 0"),
    "another-shift": (lambda: flow(time_shift_type="cubic"), "time_shift_type: 'cubic' is not one of exponential"),
    "no-terminal": (lambda: flow().stretch_shift_to_terminal(torch.ones(2)), "shift_terminal is not set"),
    "add-noise": (lambda: flow().add_noise(randn(1), randn(1), torch.tensor([1.0])), "has no add_noise; use scale_n"),
    "noise": (lambda: flow().scale_noise(randn(1, 3), torch.tensor([1000.0]), None), "noise: None is not a tensor"),
    "tokens": (
        lambda: both({}, {"num_inference_steps": 2})[1].step(
            randn(2, 5, 4), 1000.0, randn(2, 5, 4), per_token_timesteps=torch.ones(2, 4)
        ),
        r"per_token_timesteps \(2, 4\) and sample \(2, 5, 4\)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_pipeline_of_prompts_refuses_it_and_diffusers_cannot_run_it(text_pipes):
    theirs, ours = text_pipes("sd1")
    other = ours.with_scheduler(getattr(diffusers, KIND)())
    with pytest.raises(InputError, match="scheduler flow-euler: it needs a model that predicts the velocity of a flow"):
        other("a cat", num_inference_steps=2)
    before = theirs.scheduler
    try:
        theirs.scheduler = getattr(diffusers, KIND)()
        with pytest.raises(AttributeError, match="init_noise_sigma"):
            theirs("a cat", num_inference_steps=2)
    finally:
        theirs.scheduler = before


def test_a_pipeline_of_pictures_alone_runs_it_as_diffusers(save_pipeline):
    theirs, folder = save_pipeline("DDPM")
    theirs.scheduler = getattr(diffusers, KIND)(shift=3.0)
    ours = Pipeline.from_pretrained(folder, device="cpu")
    ours.scheduler = theirs.scheduler
    assert ours.scheduler_name == "flow-euler"
    options = {"batch_size": 2, "num_inference_steps": 4, "output_type": "np"}
    expected, actual = (pipe(generator=torch.Generator().manual_seed(3), **options).images for pipe in (theirs, ours))
    assert np.abs(expected - actual).max() <= 1e-4

"""UniPC over flows and with outputs of eps, against diffusers' own."""

import diffusers
import numpy as np
import pytest
import torch

import fastdiff
from fastdiff.errors import InputError
from tests.parity.schedulers.loops import STABLE_DIFFUSION, assert_loops_agree, network, randn

# diffusers passes tensors to numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
KIND = "UniPCMultistepScheduler"
EPS = {**STABLE_DIFFUSION, "final_sigmas_type": "sigma_min", "predict_x0": False}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
DYNAMIC = {**FLOW, "use_dynamic_shifting": True}
CASES = {  # options, and how a run is chosen
    "eps": (EPS, {}),
    "eps-first-order": ({**EPS, "solver_order": 1}, {}),
    "eps-third-order": ({**EPS, "solver_order": 3}, {}),
    "eps-bh1": ({**EPS, "solver_type": "bh1"}, {}),
    "eps-sample": ({**EPS, "prediction_type": "sample"}, {}),
    "eps-velocity": ({**EPS, "prediction_type": "v_prediction"}, {}),
    "eps-karras": ({**EPS, "use_karras_sigmas": True}, {}),
    "eps-thresholding-is-not-read": ({**EPS, "thresholding": True, "sample_max_value": 2.0}, {}),
    "eps-full-order-to-the-end": ({**EPS, "lower_order_final": False}, {}),
    "eps-uncorrected": ({**EPS, "disable_corrector": [0, 3]}, {}),
    "eps-of-a-flow": ({**EPS, "use_flow_sigmas": True}, {}),
    "flow": (FLOW, {}),
    "flow-shift": ({**FLOW, "flow_shift": 3.0}, {}),
    "flow-third-order": ({**FLOW, "solver_order": 3}, {}),
    "flow-bh1": ({**FLOW, "solver_type": "bh1", "final_sigmas_type": "sigma_min"}, {}),
    "flow-dynamic": (DYNAMIC, {"mu": 1.1}),
    "flow-mu-is-not-read": (FLOW, {"mu": 1.1}),
    "flow-terminal": ({**FLOW, "shift_terminal": 0.1, "flow_shift": 2.0}, {}),
    "flow-karras": ({**FLOW, "use_karras_sigmas": True}, {}),
    "flow-velocity": ({**FLOW, "flow_shift": 5.0, "prediction_type": "v_prediction"}, {}),
    "flow-sample": ({**FLOW, "prediction_type": "sample"}, {}),
    "flow-epsilon": ({**FLOW, "prediction_type": "epsilon"}, {}),
    "flow-thresholding": ({**FLOW, "thresholding": True, "sample_max_value": 2.0}, {}),
    "flow-sigmas": ({**FLOW, "flow_shift": 3.0}, {"sigmas": np.linspace(1.0, 0.05, 12)}),
    "flow-dynamic-sigmas": (DYNAMIC, {"sigmas": np.linspace(0.9, 0.05, 12), "mu": 0.5}),
    "flow-prediction-without-a-flow": ({**STABLE_DIFFUSION, "prediction_type": "flow_prediction"}, {}),
}
EACH = pytest.mark.parametrize(("options", "choice"), CASES.values(), ids=CASES)


def both(options, choice):
    schedulers = getattr(diffusers, KIND)(**options), getattr(fastdiff, KIND)(**options)
    for scheduler in schedulers:
        # diffusers changes an array of sigmas
        scheduler.set_timesteps(**{name: value.copy() if name == "sigmas" else value for name, value in choice.items()})
    return schedulers


def steps_of(options, choice):
    """Return the numbers of steps to test. A stretched run of one step divides by zero, also in diffusers."""
    if "sigmas" in choice:
        return [None]
    return [2, 5, 20, 50] if "shift_terminal" in options else [1, 2, 5, 20, 50]


@EACH
def test_whole_loop(options, choice):
    for steps in steps_of(options, choice):
        theirs, ours = both(options, {**choice, "num_inference_steps": steps})
        for name in ("timesteps", "sigmas"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert ours.num_inference_steps == theirs.num_inference_steps
        if (theirs.timesteps == theirs.timesteps[0]).sum() > 1:  # diffusers would skip a step
            theirs.set_begin_index(0)
        if options.get("solver_order") == 3:  # its float32 coefficients are differences of almost equal numbers
            theirs.sigmas = theirs.sigmas.double()
        # diffusers computes eps from a sample as a difference, in float32: off by 1.2e-5
        wide = not options.get("predict_x0", True) and options.get("prediction_type") == "sample"
        assert_loops_agree(theirs, ours, dtype=torch.float64 if wide else torch.float32)


@EACH
def test_the_schedule_is_the_scheduler(options, choice):
    chosen = choice if "sigmas" in choice else {**choice, "num_inference_steps": 7}
    _, ours = both(options, chosen)
    schedule = getattr(fastdiff, KIND)(**options).schedule(**chosen)
    assert torch.equal(schedule.timesteps, ours.timesteps)
    assert torch.equal(schedule.rows, ours._complete_table(0))


@pytest.mark.parametrize("name", ["eps", "eps-third-order", "flow-shift"])
def test_a_loop_may_begin_in_the_middle(name):
    theirs, ours = both(CASES[name][0], {"num_inference_steps": 10})
    picture, noise = randn(2, 3, 8, 8), randn(2, 3, 8, 8, seed=1)
    for scheduler in (theirs, ours):
        scheduler.set_begin_index(4)
    noisy = [each.add_noise(picture, noise, each.timesteps[[4, 4]]) for each in (theirs, ours)]
    torch.testing.assert_close(noisy[1], noisy[0], rtol=1e-6, atol=1e-6)
    assert_loops_agree(theirs, ours, begin=4)


def test_diffusers_has_no_step_to_sigma_zero_with_eps():
    """This is why fastdiff refuses it."""
    theirs = getattr(diffusers, KIND)(predict_x0=False)
    theirs.set_timesteps(3)
    sample = randn(1, 3, 4, 4)
    for t in theirs.timesteps:
        sample = theirs.step(network(sample, t), t, sample).prev_sample
    assert sample.isnan().any()


def unipc(**options):
    return getattr(fastdiff, KIND)(**options)


REFUSED = {
    "to-zero": (lambda: unipc(predict_x0=False), "predict_x0 False cannot step to sigma zero; use final_sigmas_type"),
    "eps-of-a-velocity": (
        lambda: unipc(predict_x0=False, final_sigmas_type="sigma_min", prediction_type="flow_prediction"),
        "predict_x0 False has no prediction_type flow_prediction",
    ),
    "solver": (lambda: unipc(solver_p=diffusers.DDIMScheduler()), "solver_p: .* is not supported; leave it out"),
    "terminal": (lambda: unipc(shift_terminal=0.1), "shift_terminal is only read with use_flow_sigmas"),
    "two-spacings": (lambda: unipc(**FLOW, use_beta_sigmas=True), "use_flow_sigmas excludes beta sigmas"),
    "no-mu": (lambda: unipc(**DYNAMIC).schedule(5), "mu is None; give the shift that use_dynamic_shifting needs"),
    "huge-mu": (lambda: unipc(**DYNAMIC).schedule(5, mu=1e6), "mu: 1000000.0 is not a number from -20 to 20"),
    "sigmas": (lambda: unipc().schedule(sigmas=[3.0, 1.0]), "sigmas: custom ones need use_flow_sigmas alone"),
    "sigmas-of-karras": (
        lambda: unipc(**FLOW, use_karras_sigmas=True).schedule(sigmas=[0.9, 0.1]),
        "sigmas: custom ones need use_flow_sigmas alone",
    ),
    "above-one": (lambda: unipc(**FLOW).schedule(sigmas=[1.5, 0.5]), "sigmas 1.5 to 0.5 are outside"),
    "no-noise": (lambda: unipc(**FLOW).schedule(sigmas=[0.5, 0.0]), "step 2 of 2 is undefined at sigma 0"),
    "neither": (lambda: unipc().set_timesteps(), "give one of num_inference_steps and sigmas"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)

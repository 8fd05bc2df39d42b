"""Arguments of single counted schedulers, against diffusers' own, and refused arguments."""

import sys

import diffusers
import pytest
import torch

import fastdiff
from fastdiff.errors import InputError
from tests.parity.schedulers.loops import STABLE_DIFFUSION, TOLERANCE, assert_loops_agree, pair, randn

# diffusers passes tensors to numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")


@pytest.mark.parametrize("options", [{}, {"solver_order": 3, "final_sigmas_type": "sigma_min"}], ids=["two", "three"])
def test_dpm_solver_over_custom_timesteps(options):
    theirs, ours = pair("DPMSolverMultistepScheduler", STABLE_DIFFUSION | options)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(timesteps=[901, 455, 70, 33, 3])
    assert torch.equal(ours.timesteps, theirs.timesteps) and torch.equal(ours.sigmas, theirs.sigmas)
    assert_loops_agree(theirs, ours)


def test_dpm_solver_with_the_callers_noise_and_a_learned_variance():
    theirs, ours = pair(
        "DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "variance_type": "learned"}
    )
    steps = []
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(5)
        sample, output, noise = randn(2, 3, 8, 8), randn(2, 6, 8, 8, seed=1), randn(2, 3, 8, 8, seed=2)
        steps.append(scheduler.step(output, scheduler.timesteps[0], sample, variance_noise=noise).prev_sample)
    assert (steps[1] - steps[0]).abs().max() <= TOLERANCE * steps[0].abs().max()


OTHERS = [{"solver_type": "bh2"}, {"solver_type": "logrho"}, {"variance_type": "fixed_small"}]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_dpm_solver_of_another_schedulers_config(options):
    theirs, ours = pair("DPMSolverMultistepScheduler", options)
    assert all(ours.config[name] == theirs.config[name] for name in ("solver_type", "algorithm_type", "variance_type"))


CHURNED = {"always": {"s_churn": 4.0}, "between": {"s_churn": 40.0, "s_tmin": 0.5, "s_tmax": 8.0, "s_noise": 1.01}}


@pytest.mark.parametrize("options", [{}, {"prediction_type": "v_prediction"}], ids=["epsilon", "velocity"])
@pytest.mark.parametrize("churn", CHURNED.values(), ids=CHURNED)
def test_euler_with_noise_before_the_step(churn, options):
    theirs, ours = pair("EulerDiscreteScheduler", STABLE_DIFFUSION | options)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(20)
    assert_loops_agree(theirs, ours, **churn)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_lms_of_a_lower_order(order):
    theirs, ours = pair("LMSDiscreteScheduler", STABLE_DIFFUSION)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(10)
    assert_loops_agree(theirs, ours, order=order)


def test_heun_over_custom_timesteps():
    theirs, ours = pair("HeunDiscreteScheduler", STABLE_DIFFUSION)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(timesteps=[901, 455.5, 70, 3])
    assert torch.equal(ours.timesteps, theirs.timesteps) and torch.equal(ours.sigmas, theirs.sigmas)
    assert (ours.order, ours.num_inference_steps) == (theirs.order, theirs.num_inference_steps) == (2, 4)
    assert_loops_agree(theirs, ours)


def test_heun_beginning_with_a_second_call():
    """As in diffusers, the loop's first call is the first call of a step, wherever the loop begins."""
    theirs, ours = pair("HeunDiscreteScheduler", STABLE_DIFFUSION)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(6)
        scheduler.set_begin_index(3)
    assert_loops_agree(theirs, ours, begin=3)


CHOICES = {
    "fewer-originals": {"num_inference_steps": 4, "original_inference_steps": 25},
    "strength": {"num_inference_steps": 4, "strength": 0.6},
    "timesteps": {"timesteps": [999, 639, 300]},
    "timesteps-with-strength": {"timesteps": [999, 639, 300, 20], "strength": 0.5},
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("kind", ["LCMScheduler", "TCDScheduler"])
def test_distilled_models_over_chosen_steps(kind, choice):
    theirs, ours = pair(kind, {})
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(**choice)
    assert ours.num_inference_steps == theirs.num_inference_steps
    assert torch.equal(ours.timesteps, theirs.timesteps)
    assert_loops_agree(theirs, ours)


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_tcd_with_any_eta(eta, prediction):
    theirs, ours = pair("TCDScheduler", {"prediction_type": prediction})
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(6)
    assert_loops_agree(theirs, ours, eta=eta)
    schedule = ours.schedule(6, eta=eta)
    assert torch.equal(schedule.rows, ours._complete_table(0))  # the loop above ran with this eta
    assert schedule.draws_noise == (eta > 0,) * 5 + (False,)
    default = ours.schedule(6).rows
    assert torch.equal(default, ours.schedule(6, eta=0.3).rows) and not torch.equal(default, schedule.rows)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_tcd_says_the_picture_before_the_noise(eta):
    theirs, ours = pair("TCDScheduler", {})
    sample, output = randn(2, 3, 8, 8), randn(2, 3, 8, 8, seed=1)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(4)
    for index in (0, 3):
        results = []
        for scheduler in (theirs, ours):
            scheduler._step_index = index
            generator = torch.Generator().manual_seed(2)
            results.append(scheduler.step(output, scheduler.timesteps[index], sample, eta, generator))
        for name in ("prev_sample", "pred_noised_sample"):
            expected, actual = (getattr(each, name) for each in results)
            assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lcm_says_the_denoised_picture(dtype):
    theirs, ours = pair("LCMScheduler", {"timestep_scaling": 0.01})
    sample, output = randn(2, 3, 8, 8).to(dtype), randn(2, 3, 8, 8, seed=1).to(dtype)
    results = []
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(4)
        generator = torch.Generator().manual_seed(2)
        results.append(scheduler.step(output, scheduler.timesteps[0], sample, generator))
    expected, actual = results
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    for found, theirs in zip((*actual, actual.denoised), (*expected.to_tuple(), expected.denoised), strict=True):
        assert found.dtype == theirs.dtype
        assert (found - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("kind", ["LMSDiscreteScheduler", "HeunDiscreteScheduler", "LCMScheduler", "TCDScheduler"])
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_a_half_beside_a_float_is_a_float(kind, dtypes):
    """The steps of these classes keep the wider of the two dtypes, and draw noise in it."""
    theirs, ours = pair(kind, STABLE_DIFFUSION)
    sample, output = (randn(2, 3, 8, 8, seed=i).to(dtype) for i, dtype in enumerate(dtypes))
    steps = []
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(5)
        scheduler.scale_model_input(sample, scheduler.timesteps[0])
        taken = {"generator": torch.Generator().manual_seed(3)} if kind in ("LCMScheduler", "TCDScheduler") else {}
        steps.append(scheduler.step(output, scheduler.timesteps[0], sample, **taken).prev_sample)
    expected, actual = steps
    assert actual.dtype == expected.dtype == torch.float32
    assert (actual - expected).abs().max() <= 2e-3 * expected.abs().max()


def test_beta_sigmas_without_scipy_name_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(InputError, match="use_beta_sigmas needs scipy, which is not installed; pip install scipy"):
        fastdiff.HeunDiscreteScheduler(use_beta_sigmas=True).set_timesteps(5)


WITHOUT_ZERO_SNR = ("PNDMScheduler", "LMSDiscreteScheduler", "HeunDiscreteScheduler")


@pytest.mark.parametrize("kind", WITHOUT_ZERO_SNR)
def test_zero_snr_of_a_config_is_left_aside_by_those_without(kind):
    config = diffusers.DDIMScheduler(rescale_betas_zero_snr=True).config
    needed = {"skip_prk_steps": True} if kind == "PNDMScheduler" else {}
    theirs, ours = (getattr(library, kind).from_config(config, **needed) for library in (diffusers, fastdiff))
    assert torch.equal(ours.alphas_cumprod, theirs.alphas_cumprod)
    assert ours.config["rescale_betas_zero_snr"]  # a scheduler made from this config gets the option back


@pytest.mark.parametrize("spacing", ["karras", "exponential", "beta"])
@pytest.mark.parametrize("kind", ["DDIMScheduler", "DDPMScheduler", "EulerAncestralDiscreteScheduler", "LCMScheduler"])
def test_other_sigmas_are_asked_of_those_that_have_them(kind, spacing):
    option, scheduler = {f"use_{spacing}_sigmas": True}, getattr(fastdiff, kind)
    for make in (lambda: scheduler(**option), lambda: scheduler.from_config({}, **option)):
        with pytest.raises(InputError, match=f"{kind} has no use_{spacing}_sigmas; leave it out"):
            make()
    assert scheduler.from_config(option).config[f"use_{spacing}_sigmas"]  # a config may hold it, as in diffusers


def taken_to_the_end(kind):
    ours = getattr(fastdiff, kind)()
    ours.set_timesteps(1)
    for _ in range(2):
        ours.step(randn(1, 3, 4, 4), ours.timesteps[0], randn(1, 3, 4, 4))


def spaced(**options):
    ours = fastdiff.EulerDiscreteScheduler(**options)
    ours.set_timesteps(timesteps=[5, 3])


REFUSED = {
    "before-set-timesteps": (
        lambda: fastdiff.EulerDiscreteScheduler().step(randn(1, 3), 5.0, randn(1, 3)),
        "call set_timesteps before step",
    ),
    "too-many-steps": (lambda: taken_to_the_end("EulerDiscreteScheduler"), "all 1 steps are taken"),
    "two-spacings": (
        lambda: fastdiff.EulerDiscreteScheduler(use_karras_sigmas=True, use_exponential_sigmas=True),
        "exclude each other",
    ),
    "beta-and-karras": (
        lambda: fastdiff.LMSDiscreteScheduler(use_beta_sigmas=True, use_karras_sigmas=True),
        "use_karras_sigmas and use_beta_sigmas exclude each other; choose one",
    ),
    "timesteps-of-beta": (
        lambda: fastdiff.HeunDiscreteScheduler(use_beta_sigmas=True).set_timesteps(timesteps=[5, 3]),
        "options allow no custom ones",
    ),
    "lms-order": (
        lambda: fastdiff.LMSDiscreteScheduler().step(randn(1, 3), 5.0, randn(1, 3), order=5),
        "order: 5 is not a whole number from 1 to 4",
    ),
    "other-training": (
        lambda: fastdiff.HeunDiscreteScheduler().set_timesteps(5, num_train_timesteps=500),
        "num_train_timesteps: the config has 1000",
    ),
    "lcm-past-the-originals": (
        lambda: fastdiff.LCMScheduler().schedule(51),
        "num_inference_steps is 51; 50 original_inference_steps at strength 1 allow 50; use fewer",
    ),
    "lcm-originals-past-the-training": (
        lambda: fastdiff.LCMScheduler(num_train_timesteps=20).schedule(2),
        "original_inference_steps is 50; it must be at most the 20 training steps",
    ),
    "lcm-no-timesteps": (
        lambda: fastdiff.LCMScheduler().set_timesteps(timesteps=[9, 3], strength=0.1),
        "strength 0.1 leaves none of 2 timesteps",
    ),
    "lcm-neither": (lambda: fastdiff.LCMScheduler().set_timesteps(), "give one of num_inference_steps and timesteps"),
    "lcm-epsilon-of-zero-snr": (
        lambda: fastdiff.LCMScheduler(rescale_betas_zero_snr=True).schedule(2),
        "epsilon divides by the signal",
    ),
    "unknown-option": (
        lambda: fastdiff.EulerAncestralDiscreteScheduler(no_such_option=True),
        "unknown option no_such_option",
    ),
    "ancestral-sample": (
        lambda: fastdiff.EulerAncestralDiscreteScheduler(prediction_type="sample"),
        "prediction_type: 'sample' is not one of epsilon, v_prediction",
    ),
    "timesteps-of-karras": (lambda: spaced(use_karras_sigmas=True), "options allow no custom ones"),
    "unipc-to-zero": (
        lambda: fastdiff.UniPCMultistepScheduler(lower_order_final=False),
        "lower_order_final False cannot step to sigma zero",
    ),
    "repeated-timesteps": (
        lambda: fastdiff.UniPCMultistepScheduler(num_train_timesteps=10).schedule(10),
        "repeats a timestep; use fewer steps",
    ),
    "dpm-repeated-timesteps": (
        lambda: fastdiff.DPMSolverMultistepScheduler(num_train_timesteps=10, solver_order=2).schedule(10),
        "repeats a timestep; use fewer steps",
    ),
    "mu": (lambda: fastdiff.DPMSolverMultistepScheduler().set_timesteps(5, mu=1.0), "mu is only read with use_dynamic"),
    "neither": (lambda: fastdiff.EulerDiscreteScheduler().set_timesteps(), "give one of num_inference_steps"),
    "no-steps": (lambda: fastdiff.EulerDiscreteScheduler().set_timesteps(0), "num_inference_steps is 0"),
    "eta": (
        lambda: fastdiff.EulerDiscreteScheduler().schedule(5, eta=0.5),
        "eta is an option of ddim and tcd, not of EulerDiscreteScheduler",
    ),
    "tcd-eta": (lambda: fastdiff.TCDScheduler().schedule(5, eta=1.5), "eta: 1.5 is not a number from 0 to 1"),
    "tcd-clipped-output": (
        lambda: fastdiff.TCDScheduler().schedule(5, use_clipped_model_output=True),
        "use_clipped_model_output is an option of ddim, not of TCDScheduler",
    ),
    "tcd-past-the-originals": (
        lambda: fastdiff.TCDScheduler().set_timesteps(51, original_inference_steps=50),
        "num_inference_steps is 51; 50 original_inference_steps at strength 1 allow 50",
    ),
    "velocity": (
        lambda: fastdiff.EulerDiscreteScheduler().get_velocity(randn(1), randn(1), torch.tensor([1])),
        "has no get_velocity",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)

"""The schedulers whose steps are counted, against diffusers' own: timesteps, every option, and whole loops."""

import diffusers
import pytest
import torch

import fastdiff
from fastdiff.errors import InputError

# diffusers hands tensors to numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
TOLERANCE = 1e-5  # of the largest value
STABLE_DIFFUSION = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
PROCESS = {
    "defaults": {},
    "stable-diffusion": {**STABLE_DIFFUSION, "steps_offset": 1, "timestep_spacing": "leading"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "trained-betas": {"num_train_timesteps": 60, "trained_betas": torch.linspace(0.001, 0.2, 60).tolist()},
    "velocity": {**STABLE_DIFFUSION, "prediction_type": "v_prediction"},
    "trailing": {**STABLE_DIFFUSION, "timestep_spacing": "trailing"},
    "linspace": {**STABLE_DIFFUSION, "timestep_spacing": "linspace"},
    "zero-snr": {
        **STABLE_DIFFUSION,
        "rescale_betas_zero_snr": True,
        "prediction_type": "v_prediction",
        "timestep_spacing": "trailing",
    },
}
SPACED = {
    "karras": {**STABLE_DIFFUSION, "use_karras_sigmas": True},
    "exponential": {**STABLE_DIFFUSION, "use_exponential_sigmas": True},
    "karras-cosine": {"beta_schedule": "squaredcos_cap_v2", "use_karras_sigmas": True},
    "sigma-min-last": {**STABLE_DIFFUSION, "final_sigmas_type": "sigma_min"},
}
OPTIONS = {
    "EulerDiscreteScheduler": PROCESS
    | SPACED
    | {
        "sample": {**STABLE_DIFFUSION, "prediction_type": "sample"},
        "log-linear": {**STABLE_DIFFUSION, "interpolation_type": "log_linear"},
        "karras-bounds": {**STABLE_DIFFUSION, "use_karras_sigmas": True, "sigma_min": 0.05, "sigma_max": 9.0},
        "continuous": {
            **STABLE_DIFFUSION,
            "timestep_type": "continuous",
            "prediction_type": "v_prediction",
            "use_karras_sigmas": True,
        },
    },
    "EulerAncestralDiscreteScheduler": PROCESS,
    "PNDMScheduler": {
        name: {**options, "skip_prk_steps": True} for name, options in PROCESS.items() if name != "zero-snr"
    }
    | {
        "alpha-of-one": {**STABLE_DIFFUSION, "skip_prk_steps": True, "set_alpha_to_one": True},
        "velocity-offset": {
            **STABLE_DIFFUSION,
            "skip_prk_steps": True,
            "steps_offset": 1,
            "prediction_type": "v_prediction",
        },
    },
    "UniPCMultistepScheduler": PROCESS
    | SPACED
    | {
        "first-order": {**STABLE_DIFFUSION, "solver_order": 1},
        "third-order": {**STABLE_DIFFUSION, "solver_order": 3},
        "bh1": {**STABLE_DIFFUSION, "solver_type": "bh1", "final_sigmas_type": "sigma_min"},
        "sample": {**STABLE_DIFFUSION, "prediction_type": "sample"},
        "thresholding": {**STABLE_DIFFUSION, "thresholding": True, "sample_max_value": 2.0},
        "full-order-to-the-end": {
            **STABLE_DIFFUSION,
            "lower_order_final": False,
            "final_sigmas_type": "sigma_min",
        },
        "uncorrected": {**STABLE_DIFFUSION, "disable_corrector": [0, 3]},
        "karras-bounds": {
            **STABLE_DIFFUSION,
            "use_karras_sigmas": True,
            "sigma_min": 0.05,
            "sigma_max": 9.0,
            "final_sigmas_type": "sigma_min",
        },
    },
    "DPMSolverMultistepScheduler": PROCESS
    | SPACED
    | {
        "first-order": {**STABLE_DIFFUSION, "solver_order": 1},
        "third-order": {**STABLE_DIFFUSION, "solver_order": 3},
        "heun": {**STABLE_DIFFUSION, "solver_type": "heun"},
        "sample": {**STABLE_DIFFUSION, "prediction_type": "sample"},
        "thresholding": {**STABLE_DIFFUSION, "thresholding": True, "sample_max_value": 2.0},
        "full-order-to-the-end": {
            **STABLE_DIFFUSION,
            "lower_order_final": False,
            "final_sigmas_type": "sigma_min",
            "solver_order": 3,
        },
        "euler-at-final": {**STABLE_DIFFUSION, "euler_at_final": True, "final_sigmas_type": "sigma_min"},
        "clipped-cosine": {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1},
        "karras-sigma-min-last": {
            **STABLE_DIFFUSION,
            "use_karras_sigmas": True,
            "final_sigmas_type": "sigma_min",
        },
        "lu": {**STABLE_DIFFUSION, "use_lu_lambdas": True},
        "sde": {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++"},
        "sde-heun-karras": {
            **STABLE_DIFFUSION,
            "algorithm_type": "sde-dpmsolver++",
            "solver_type": "heun",
            "use_karras_sigmas": True,
        },
        "sde-third-order": {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++", "solver_order": 3},
    },
}
CASES = {f"{kind}-{name}": (kind, options) for kind, cases in OPTIONS.items() for name, options in cases.items()}
EACH = pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)


def pair(kind, options):
    options = options | ({"skip_prk_steps": True} if kind == "PNDMScheduler" else {})
    return getattr(diffusers, kind)(**options), getattr(fastdiff, kind)(**options)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network(sample, timestep):
    """A smooth stand-in for a model, that knows the timestep."""
    return torch.tanh(1.3 * sample.roll(1, dims=-1) - 0.4 * sample) + 0.3 * torch.cos(torch.as_tensor(timestep) / 100)


def drawn_loop(scheduler, begin=0, **kwargs):
    """Pictures of every step after `set_timesteps`, and the generator's state after the loop."""
    generator, taken = torch.Generator().manual_seed(0), {}
    sample = randn(2, 3, 8, 8, seed=1) * scheduler.init_noise_sigma
    if "generator" in type(scheduler).step.__code__.co_varnames:
        taken = {"generator": generator}
    pictures = []
    for t in scheduler.timesteps[begin:]:
        output = network(scheduler.scale_model_input(sample, t), t)
        sample = scheduler.step(output, t, sample, **taken, **kwargs).prev_sample
        pictures.append(sample)
    return pictures, generator.get_state()


def assert_loops_agree(theirs, ours, begin=0, **kwargs):
    (expected, their_state), (actual, our_state) = (drawn_loop(each, begin, **kwargs) for each in (theirs, ours))
    start = float(theirs.init_noise_sigma)
    # without signal at the beginning sigma is 4096 there: a float32 that large, and so diffusers' step, is off by this
    rounding = 4 * torch.finfo(torch.float32).eps * start if start > 1000 else 0.0
    for picture, other in zip(actual, expected, strict=True):
        assert picture.dtype == other.dtype
        assert picture.isfinite().all()
        assert (picture - other).abs().max() <= TOLERANCE * other.abs().max() + rounding
    assert torch.equal(our_state, their_state)


@EACH
def test_tables_of_the_process_are_equal(kind, options):
    theirs, ours = pair(kind, options)
    for name in ("betas", "alphas", "alphas_cumprod"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert (ours.order, len(ours)) == (theirs.order, len(theirs))
    assert {key: ours.config[key] for key in theirs.config if not key.startswith("_")} == {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in theirs.config.items()
        if not key.startswith("_")
    }


@EACH
@pytest.mark.parametrize("steps", [1, 2, 5, 20, 50])
def test_whole_loop(kind, options, steps):
    theirs, ours = pair(kind, options)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(steps)
    assert ours.timesteps.dtype == theirs.timesteps.dtype
    assert torch.equal(ours.timesteps, theirs.timesteps)
    if hasattr(theirs, "sigmas"):
        assert torch.equal(ours.sigmas, theirs.sigmas)
    assert ours.init_noise_sigma == theirs.init_noise_sigma
    assert ours.num_inference_steps == theirs.num_inference_steps
    # where the first timestep comes twice diffusers would skip a step, and fail at the end
    if hasattr(theirs, "set_begin_index") and (theirs.timesteps == theirs.timesteps[0]).sum() > 1:
        theirs.set_begin_index(0)
    if options.get("solver_order") == 3:  # in float32 its coefficients are differences of almost equal numbers
        theirs.sigmas = theirs.sigmas.double()
    assert_loops_agree(theirs, ours)


@EACH
def test_the_schedule_is_the_scheduler(kind, options):
    """The pipeline's table and the scheduler's steps are the same numbers."""
    _, ours = pair(kind, options)
    ours.set_timesteps(7)
    schedule = ours.schedule(7)
    assert torch.equal(schedule.timesteps, ours.timesteps)
    assert schedule.init_noise_sigma == float(ours.init_noise_sigma)
    assert torch.equal(schedule.rows, ours._make_table(0)[: len(schedule)])
    assert (schedule.scales_input, schedule.keeps_output is not None) == (ours.scales_input, ours.multistep)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_loop_may_begin_in_the_middle(kind):
    """As image-to-image pipelines do, by the first timestep or by set_begin_index; add_noise knows where it begins."""
    for set_begin in (False, True):
        theirs, ours = pair(kind, STABLE_DIFFUSION)
        for scheduler in (theirs, ours):
            scheduler.set_timesteps(10)
            if set_begin and hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(4)
        picture, noise = randn(2, 3, 8, 8), randn(2, 3, 8, 8, seed=1)
        noisy = [each.add_noise(picture, noise, each.timesteps[[4, 4]]) for each in (theirs, ours)]
        torch.testing.assert_close(noisy[1], noisy[0], rtol=1e-6, atol=1e-6)
        assert_loops_agree(theirs, ours, begin=4)


@pytest.mark.parametrize("kind", OPTIONS)
def test_from_config_of_any_other(kind):
    """`--scheduler X` equals X.from_config(pipe.scheduler.config), with the options that nobody set left to X."""
    needed = {"skip_prk_steps": True} if kind == "PNDMScheduler" else {}
    for other in ("DDIMScheduler", "DDPMScheduler", *OPTIONS):
        theirs, ours = pair(other, {"beta_end": 0.03})
        expected = getattr(diffusers, kind).from_config(theirs.config, **needed)
        for config in (theirs.config, ours.config):
            converted = getattr(fastdiff, kind).from_config(config, **needed)
            for name in ("timestep_spacing", "beta_end", "prediction_type", "steps_offset"):
                assert converted.config[name] == expected.config[name]


@pytest.mark.parametrize("kind", OPTIONS)
def test_half_precision_is_stepped_in_float32(kind):
    theirs, ours = pair(kind, STABLE_DIFFUSION)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(5)
    sample, output = randn(2, 3, 8, 8).half(), randn(2, 3, 8, 8, seed=1).half()
    t = ours.timesteps[0]
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    steps = []
    for scheduler, generator in zip((theirs, ours), generators, strict=True):
        scheduler.scale_model_input(sample, t)
        taken = {"generator": generator} if "generator" in type(scheduler).step.__code__.co_varnames else {}
        steps.append(scheduler.step(output, t, sample, **taken).prev_sample)
    expected, actual = steps
    assert actual.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(actual, expected, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("kind", OPTIONS)
def test_result_without_names(kind):
    theirs, ours = pair(kind, {})
    sample = randn(1, 3, 4, 4)
    lengths = []
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(5)
        t = scheduler.timesteps[0]
        scheduler.scale_model_input(sample, t)
        result = scheduler.step(sample, t, sample, return_dict=False)
        assert type(result) is tuple
        lengths.append(len(result))
    assert lengths[0] == lengths[1]


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


@pytest.mark.parametrize(
    "choice", [{"timesteps": [901, 455.5, 70, 3]}, {"sigmas": [14.0, 5.0, 1.0, 0.1, 0.0]}], ids=list
)
def test_euler_over_custom_timesteps_and_sigmas(choice):
    theirs, ours = pair("EulerDiscreteScheduler", STABLE_DIFFUSION)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(**choice)
    assert torch.equal(ours.timesteps, theirs.timesteps) and torch.equal(ours.sigmas, theirs.sigmas)
    assert_loops_agree(theirs, ours)


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
    "beta-sigmas": (lambda: fastdiff.EulerDiscreteScheduler(use_beta_sigmas=True), "use_beta_sigmas: True is not"),
    "karras-of-ancestral": (
        lambda: fastdiff.EulerAncestralDiscreteScheduler(no_such_option=True),
        "unknown option no_such_option",
    ),
    "ancestral-sample": (
        lambda: fastdiff.EulerAncestralDiscreteScheduler(prediction_type="sample"),
        "prediction_type: 'sample' is not one of epsilon, v_prediction",
    ),
    "timesteps-of-karras": (lambda: spaced(use_karras_sigmas=True), "sigmas are not the timesteps'"),
    "deprecated-solver": (
        lambda: fastdiff.DPMSolverMultistepScheduler(algorithm_type="dpmsolver"),
        "algorithm_type: 'dpmsolver' is not one of",
    ),
    "flow-sigmas": (
        lambda: fastdiff.DPMSolverMultistepScheduler(use_flow_sigmas=True),
        "use_flow_sigmas: True is not",
    ),
    "unipc-to-zero": (
        lambda: fastdiff.UniPCMultistepScheduler(lower_order_final=False),
        "lower_order_final False has no step to sigma zero",
    ),
    "unipc-flow": (lambda: fastdiff.UniPCMultistepScheduler(use_flow_sigmas=True), "use_flow_sigmas: True is not"),
    "repeated-timesteps": (
        lambda: fastdiff.UniPCMultistepScheduler(num_train_timesteps=10).schedule(10),
        "repeats a timestep; use fewer steps",
    ),
    "dpm-repeated-timesteps": (
        lambda: fastdiff.DPMSolverMultistepScheduler(num_train_timesteps=10, solver_order=2).schedule(10),
        "repeats a timestep; use fewer steps",
    ),
    "runge-kutta": (lambda: fastdiff.PNDMScheduler(), "skip_prk_steps False is not supported"),
    "mu": (lambda: fastdiff.DPMSolverMultistepScheduler().set_timesteps(5, mu=1.0), "mu is of use_dynamic_shifting"),
    "neither": (lambda: fastdiff.EulerDiscreteScheduler().set_timesteps(), "give one of num_inference_steps"),
    "no-steps": (lambda: fastdiff.EulerDiscreteScheduler().set_timesteps(0), "num_inference_steps is 0"),
    "eta": (lambda: fastdiff.EulerDiscreteScheduler().schedule(5, eta=0.5), "eta is an option of ddim"),
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

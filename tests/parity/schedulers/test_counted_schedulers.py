"""The counted schedulers against diffusers' own: timesteps, every option, and whole loops."""

import diffusers
import pytest
import torch

import fastdiff
from tests.parity.schedulers.loops import (
    PROCESS,
    SIGMA_MIN_LAST,
    SOLVERS,
    SPACED,
    STABLE_DIFFUSION,
    TOLERANCE,
    WITHOUT_ZERO_SNR,
    assert_loops_agree,
    network,
    pair,
    randn,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword",  # diffusers passes tensors to numpy
    "ignore:__array_wrap__ must accept context",
    "ignore:.*algorithm_type.* is deprecated:FutureWarning",  # of dpmsolver and sde-dpmsolver
)
OPTIONS = {
    "EulerDiscreteScheduler": PROCESS
    | SPACED
    | SIGMA_MIN_LAST
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
    "LMSDiscreteScheduler": WITHOUT_ZERO_SNR | SPACED | {"sample": {**STABLE_DIFFUSION, "prediction_type": "sample"}},
    "HeunDiscreteScheduler": WITHOUT_ZERO_SNR
    | SPACED
    | {
        "sample": {**STABLE_DIFFUSION, "prediction_type": "sample"},
        "exponential-betas": {"beta_schedule": "exp"},
        "clipped": {**STABLE_DIFFUSION, "clip_sample": True, "clip_sample_range": 0.7},
        "clipped-velocity": {**STABLE_DIFFUSION, "clip_sample": True, "prediction_type": "v_prediction"},
    },
    "LCMScheduler": PROCESS
    | {
        "sample": {"prediction_type": "sample"},
        "clipped": {"clip_sample": True, "clip_sample_range": 0.7},
        "thresholding": {"thresholding": True, "sample_max_value": 2.0},
        "scaling": {"timestep_scaling": 0.001, "original_inference_steps": 100},
        "alpha-of-timestep-zero": {"set_alpha_to_one": False},
        "zero-snr-clipped": {"rescale_betas_zero_snr": True, "clip_sample": True},
    },
    "TCDScheduler": PROCESS
    | {
        "sample": {"prediction_type": "sample"},
        "clipping-is-not-read": {"clip_sample": True, "clip_sample_range": 0.7, "thresholding": True},
        "originals": {"original_inference_steps": 100, "timestep_scaling": 0.1, "set_alpha_to_one": False},
    },
    "PNDMScheduler": {name: {**options, "skip_prk_steps": True} for name, options in WITHOUT_ZERO_SNR.items()}
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
    | SIGMA_MIN_LAST
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
    | SIGMA_MIN_LAST
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
for each, more in SOLVERS.items():
    OPTIONS[each] = OPTIONS.get(each, {}) | more
CASES = {f"{kind}-{name}": (kind, options) for kind, cases in OPTIONS.items() for name, options in cases.items()}
EACH = pytest.mark.parametrize(  # whole loops, below, run every case in make test
    ("kind", "options"),
    [
        pytest.param(*case, id=name, marks=[] if name.endswith("-defaults") else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)


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


@pytest.mark.parametrize(
    ("kind", "options", "steps"),
    [  # make test runs every case with 5 steps, and each scheduler's defaults with every number
        pytest.param(
            *case,
            steps,
            id=f"{steps}-{name}",
            marks=[] if steps == 5 or name.endswith("-defaults") else pytest.mark.slow,
        )
        for name, case in CASES.items()
        for steps in (1, 2, 5, 20, 50)
    ],
)
def test_whole_loop(kind, options, steps):
    theirs, ours = pair(kind, options)
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(steps)
    if kind.startswith("KDPM2"):  # some of diffusers' timesteps are float64, and some are computed by torch in float32
        torch.testing.assert_close(ours.timesteps, theirs.timesteps.float(), rtol=1e-6, atol=0)
    else:
        assert ours.timesteps.dtype == theirs.timesteps.dtype
        assert torch.equal(ours.timesteps, theirs.timesteps)
    if hasattr(theirs, "sigmas"):
        assert torch.equal(ours.sigmas, theirs.sigmas)
    assert ours.init_noise_sigma == theirs.init_noise_sigma
    assert ours.num_inference_steps == theirs.num_inference_steps
    # if the first timestep comes twice, diffusers would skip a step and fail at the end
    if hasattr(theirs, "set_begin_index") and (theirs.timesteps == theirs.timesteps[0]).sum() > 1:
        theirs.set_begin_index(0)
    if options.get("solver_order") == 3:  # its float32 coefficients are differences of almost equal numbers
        theirs.sigmas = theirs.sigmas.double()
    assert_loops_agree(theirs, ours, **tolerance_of(kind, options, steps))


def tolerance_of(kind, options, steps):
    """Return arguments of `assert_loops_agree` that differ from TOLERANCE in float32."""
    if kind == "LMSDiscreteScheduler" and steps == 50:
        return {"tolerance": 1e-4}  # diffusers integrates its polynomials numerically, in float32: off by 4e-5
    if kind == "LCMScheduler" and steps == 50:
        return {"tolerance": 2e-5}  # each step amplifies earlier rounding; see test_each_step_of_lcm
    if kind == "EulerAncestralDiscreteScheduler" and options.get("rescale_betas_zero_snr"):
        return {"dtype": torch.float64}  # in float32 diffusers loses digits at sigma 4096
    if kind == "DEISMultistepScheduler" or kind.startswith("KDPM2"):
        return {"dtype": torch.float64}  # in float32 diffusers loses digits of differences, up to 2e-4
    if kind == "HeunDiscreteScheduler":
        # diffusers divides a difference by the smallest sigma and multiplies it by the largest, an error of 7e-2 in
        # float32 for two steps of a cosine. So do we if x0 is clipped, an error of 3e-5; otherwise ours is 5e-6
        clipped = options.get("clip_sample") and steps == 2
        return {"dtype": torch.float64, "tolerance": 1e-4 if clipped else TOLERANCE}
    return {}


@pytest.mark.parametrize("options", OPTIONS["LCMScheduler"].values(), ids=OPTIONS["LCMScheduler"])
def test_each_step_of_lcm(options):
    """Both schedulers take each of 50 steps from the same sample."""
    theirs, ours = pair("LCMScheduler", options)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(50)
    sample = randn(2, 3, 8, 8, seed=1)
    for t in theirs.timesteps:
        output = network(sample, t)
        expected, actual = (
            scheduler.step(output, t, sample, generator=generator).prev_sample
            for scheduler, generator in zip((theirs, ours), generators, strict=True)
        )
        assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()
        sample = expected


@EACH
def test_the_schedule_is_the_scheduler(kind, options):
    """The pipeline's table and the scheduler's steps have the same numbers."""
    _, ours = pair(kind, options)
    ours.set_timesteps(7)
    schedule = ours.schedule(7)
    assert torch.equal(schedule.timesteps, ours.timesteps)
    assert schedule.init_noise_sigma == float(ours.init_noise_sigma)
    assert torch.equal(schedule.rows, ours._complete_table(0))
    assert (schedule.scales_input, schedule.multistep) == (ours.scales_input, ours.multistep)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_loop_may_begin_in_the_middle(kind):
    """Image-to-image pipelines begin at a timestep or at set_begin_index, and add_noise reads where."""
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
    """`--scheduler X` equals X.from_config(pipe.scheduler.config): options that nobody set are X's defaults."""
    needed = {"skip_prk_steps": True} if kind == "PNDMScheduler" else {}
    for other in ("DDIMScheduler", "DDPMScheduler", *OPTIONS):
        theirs, ours = pair(other, {"beta_end": 0.03, "num_train_timesteps": 60})
        expected = getattr(diffusers, kind).from_config(theirs.config, **needed)
        for config in (theirs.config, ours.config):
            converted = getattr(fastdiff, kind).from_config(config, **needed)
            for name in ("timestep_spacing", "beta_end", "prediction_type", "steps_offset"):
                assert converted.config.get(name) == expected.config.get(name)


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

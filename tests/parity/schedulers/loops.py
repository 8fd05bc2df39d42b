"""Compare loops over a diffusers scheduler and over ours with the same options, picture by picture; and option sets."""

import contextlib
import sys
from unittest import mock

import diffusers
import torch
from diffusers.utils.torch_utils import randn_tensor

import fastdiff

TOLERANCE = 1e-5  # of the largest value
STABLE_DIFFUSION = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def pair(kind, options):
    """Return diffusers' scheduler and ours.

    diffusers' constructor of KDPM2 sets as many timesteps as in training, which takes longer than a whole loop. Here it
    sets ten.
    """
    options = ({"skip_prk_steps": True} if kind == "PNDMScheduler" else {}) | options
    theirs = getattr(diffusers, kind)
    set_timesteps = theirs.set_timesteps

    def set_ten(self, steps, *rest):
        set_timesteps(self, 10, *rest)

    patched = mock.patch.object(theirs, "set_timesteps", set_ten) if "KDPM2" in kind else contextlib.nullcontext()
    with patched:
        return theirs(**options), getattr(fastdiff, kind)(**options)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network(sample, timestep):
    """A smooth stand-in for a model that depends on the timestep."""
    return torch.tanh(1.3 * sample.roll(1, dims=-1) - 0.4 * sample) + 0.3 * torch.cos(torch.as_tensor(timestep) / 100)


def drawn_loop(scheduler, begin=0, dtype=torch.float32, **kwargs):
    """Return the pictures of every step after `set_timesteps`, and the generator's state after the loop.

    Noise is drawn in float32 for any `dtype`, so loops in two dtypes draw the same noise.
    """
    generator, taken = torch.Generator().manual_seed(0), {}
    sample = (randn(2, 3, 8, 8, seed=1) * scheduler.init_noise_sigma).to(dtype)
    if "generator" in type(scheduler).step.__code__.co_varnames:
        taken = {"generator": generator}
    pictures = []
    for t in scheduler.timesteps[begin:]:
        output = network(scheduler.scale_model_input(sample, t), t)
        with float32_noise(scheduler):
            sample = scheduler.step(output, t, sample, **taken, **kwargs).prev_sample
        pictures.append(sample)
    return pictures, generator.get_state()


def float32_noise(scheduler):
    """Make a diffusers scheduler draw its noise in float32."""
    module = sys.modules[type(scheduler).__module__]
    if not module.__name__.startswith("diffusers.") or not hasattr(module, "randn_tensor"):
        return contextlib.nullcontext()

    def drawn(shape, dtype=None, **options):
        return randn_tensor(shape, dtype=torch.float32, **options).to(dtype)

    return mock.patch.object(module, "randn_tensor", drawn)


def assert_loops_agree(theirs, ours, begin=0, tolerance=TOLERANCE, dtype=torch.float32, **kwargs):
    """Run both loops and compare them. diffusers computes in `dtype`."""
    if dtype == torch.float64:
        theirs.sigmas = theirs.sigmas.double()
    expected, their_state = drawn_loop(theirs, begin, dtype, **kwargs)
    actual, our_state = drawn_loop(ours, begin, **kwargs)
    start = float(theirs.init_noise_sigma)
    # without signal at the start, sigma is 4096 there; float32 values that large, and diffusers' step, have this error
    rounding = 4 * torch.finfo(torch.float32).eps * start if start > 1000 else 0.0
    for picture, other in zip(actual, expected, strict=True):
        assert (picture.dtype, other.dtype) == (torch.float32, dtype)
        assert picture.isfinite().all()
        assert (picture - other).abs().max() <= tolerance * other.abs().max() + rounding
    assert torch.equal(our_state, their_state)


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
WITHOUT_ZERO_SNR = {name: options for name, options in PROCESS.items() if name != "zero-snr"}
SPACED = {
    "karras": {**STABLE_DIFFUSION, "use_karras_sigmas": True},
    "exponential": {**STABLE_DIFFUSION, "use_exponential_sigmas": True},
    "beta": {**STABLE_DIFFUSION, "use_beta_sigmas": True},
    "karras-cosine": {"beta_schedule": "squaredcos_cap_v2", "use_karras_sigmas": True},
    "beta-trailing": {**STABLE_DIFFUSION, "use_beta_sigmas": True, "timestep_spacing": "trailing"},
}
SIGMA_MIN_LAST = {
    "sigma-min-last": {**STABLE_DIFFUSION, "final_sigmas_type": "sigma_min"},
    "beta-sigma-min-last": {**STABLE_DIFFUSION, "use_beta_sigmas": True, "final_sigmas_type": "sigma_min"},
}
THRESHOLDING = {**STABLE_DIFFUSION, "thresholding": True, "sample_max_value": 2.0}
SAMPLE = {**STABLE_DIFFUSION, "prediction_type": "sample"}
VELOCITY = {**STABLE_DIFFUSION, "prediction_type": "v_prediction"}
FLOWS = {
    "flow": {"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
    "flow-shift": {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0},
    "flow-epsilon": {"use_flow_sigmas": True},
    "flow-velocity": {"use_flow_sigmas": True, "prediction_type": "v_prediction"},
    "flow-sample": {"use_flow_sigmas": True, "prediction_type": "sample"},
    "flow-third-order": {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "solver_order": 3},
    "flow-without-its-sigmas": {**STABLE_DIFFUSION, "prediction_type": "flow_prediction"},
}


def of_algorithm(name, **options):
    """Return option sets of a DPM-Solver algorithm on eps."""
    base = {"algorithm_type": name, "final_sigmas_type": "sigma_min", **options}
    return {
        name: {**STABLE_DIFFUSION, **base},
        f"{name}-first-order": {**STABLE_DIFFUSION, **base, "solver_order": 1},
        f"{name}-heun": {**STABLE_DIFFUSION, **base, "solver_type": "heun"},
        f"{name}-velocity": {**VELOCITY, **base},
        f"{name}-sample": {**SAMPLE, **base},
        f"{name}-karras": {**STABLE_DIFFUSION, **base, "use_karras_sigmas": True},
        f"{name}-flow": {**base, "use_flow_sigmas": True},
    }


DPM2 = {  # diffusers' constructor takes a second or more for 1000 training steps
    name: options if name in ("defaults", "trained-betas") else {**options, "num_train_timesteps": 200}
    for name, options in (WITHOUT_ZERO_SNR | SPACED).items()
}
THIRD_ORDER = {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min", "solver_order": 3}
SOLVERS = {
    "KDPM2DiscreteScheduler": DPM2,
    # diffusers' pictures are NaN for a cosine in few steps; see tests/samplers/test_dpm2.py
    "KDPM2AncestralDiscreteScheduler": {name: options for name, options in DPM2.items() if "cosine" not in name},
    "DEISMultistepScheduler": WITHOUT_ZERO_SNR
    | SPACED
    | FLOWS
    | {
        "first-order": {**STABLE_DIFFUSION, "solver_order": 1},
        "third-order": {**STABLE_DIFFUSION, "solver_order": 3},
        "third-order-to-the-end": {**STABLE_DIFFUSION, "solver_order": 3, "lower_order_final": False},
        "sample": SAMPLE,
        "thresholding": THRESHOLDING,
        "thresholding-velocity": THRESHOLDING | VELOCITY,
    },
    "DPMSolverSinglestepScheduler": {
        name: {key: value for key, value in options.items() if key not in ("timestep_spacing", "steps_offset")}
        for name, options in (WITHOUT_ZERO_SNR | SPACED | SIGMA_MIN_LAST | FLOWS).items()
        if name not in ("trailing", "linspace", "beta-trailing")
    }
    | of_algorithm("dpmsolver")
    | {
        "first-order": {**STABLE_DIFFUSION, "solver_order": 1},
        "third-order": {**STABLE_DIFFUSION, "solver_order": 3},
        "third-order-heun": {**STABLE_DIFFUSION, "solver_order": 3, "solver_type": "heun"},
        "third-order-sigma-min-last": {**STABLE_DIFFUSION, "solver_order": 3, "final_sigmas_type": "sigma_min"},
        "lower-order-final": {**STABLE_DIFFUSION, "lower_order_final": True, "final_sigmas_type": "sigma_min"},
        "heun": {**STABLE_DIFFUSION, "solver_type": "heun"},
        "sample": SAMPLE,
        "thresholding": THRESHOLDING,
        "clipped-cosine": {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1},
        "sde": {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++"},
        "sde-heun": {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++", "solver_type": "heun"},
        "sde-third-order": {**STABLE_DIFFUSION, "algorithm_type": "sde-dpmsolver++", "solver_order": 3},
        "sde-third-order-heun": {
            **STABLE_DIFFUSION,
            "algorithm_type": "sde-dpmsolver++",
            "solver_order": 3,
            "solver_type": "heun",
        },
        "dpmsolver-third-order": STABLE_DIFFUSION | THIRD_ORDER,
        "dpmsolver-third-order-heun": {**STABLE_DIFFUSION, **THIRD_ORDER, "solver_type": "heun"},
    },
    "DPMSolverMultistepScheduler": FLOWS
    | of_algorithm("dpmsolver")
    | of_algorithm("sde-dpmsolver")
    | {
        "dpmsolver-third-order": STABLE_DIFFUSION | THIRD_ORDER,
        "dpmsolver-thresholding": {**THRESHOLDING, "algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
        "flow-sde": {"use_flow_sigmas": True, "algorithm_type": "sde-dpmsolver++"},
        "lu-cosine": {"beta_schedule": "squaredcos_cap_v2", "use_lu_lambdas": True},
    },
}

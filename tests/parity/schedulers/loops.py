"""Compare loops over a diffusers scheduler and over ours with the same options, picture by picture."""

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
    options = ({"skip_prk_steps": True} if kind == "PNDMScheduler" else {}) | options
    return getattr(diffusers, kind)(**options), getattr(fastdiff, kind)(**options)


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

"""Compare text-to-image pipelines of diffusers and ours: the latents of every step and the pictures, from one noise."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

LATENTS = 1e-5  # relative to the largest value of a step
PICTURES = 1e-3

Drawn = tuple[list[tuple[float, Tensor]], Any]  # the timestep and the latents of each step, and the pictures


def draw(pipe: Any, edit: Callable | None = None, names: Sequence[str] = (), seed: Any = 5, **options: Any) -> Drawn:
    """Run a pipeline of either library with a generator of this seed, or one generator for each seed of a list.

    `edit` is a callback. It gets the latents and the tensors in `names`.
    """
    states = []

    def callback(pipe, step, timestep, tensors):
        latents = tensors["latents"]
        returned = tensors if edit is None else edit(pipe, step, timestep, tensors)
        states.append((float(timestep), returned.get("latents", latents).clone()))
        return returned

    seeds = seed if isinstance(seed, list) else [seed]
    generators = [Generator().manual_seed(each) for each in seeds]
    options = {"num_inference_steps": 3, "output_type": "pt", "prompt": "the photo of a cat"} | options
    images = pipe(
        generator=generators if isinstance(seed, list) else generators[0],
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=["latents", *names],
        **options,
    ).images
    return states, images


def assert_same(drawn: Drawn, expected: Drawn) -> None:
    """Fail if the latents of a step or the pictures differ by more than the tolerance."""
    (ours, our_pictures), (theirs, their_pictures) = drawn, expected
    assert [timestep for timestep, _ in ours] == [timestep for timestep, _ in theirs]
    for i, ((_, x), (_, wanted)) in enumerate(zip(ours, theirs, strict=True)):
        error = (x - wanted).abs().max() / wanted.abs().max()
        assert error <= LATENTS, f"step {i}: {error:.1e}"
    np.testing.assert_allclose(torch.as_tensor(our_pictures), torch.as_tensor(their_pictures), rtol=0, atol=PICTURES)


def assert_both_draw_the_same(theirs: Any, ours: Any, **options: Any) -> Drawn:
    """Assert that both pipelines draw the same, and return it."""
    expected = draw(theirs, **options)
    assert_same(draw(ours, **options), expected)
    return expected

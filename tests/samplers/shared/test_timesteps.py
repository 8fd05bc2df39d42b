"""The timesteps of a run: their number, their order, and invalid ones."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff import DDPMScheduler
from fastdiff.errors import InputError
from fastdiff.samplers.ddim import DDIMConfig
from fastdiff.samplers.ddpm import DDPMConfig
from fastdiff.samplers.shared.timesteps import custom_timesteps, spaced_timesteps


@pytest.mark.parametrize("steps", [1, 29, 58, 97, 999, 1000])
def test_trailing_gives_as_many_steps_as_asked(steps):
    """np.arange can round to one value too many, which becomes timestep -1 in diffusers."""
    for total in (100, 1000):
        timesteps = spaced_timesteps(
            DDIMConfig(num_train_timesteps=total, timestep_spacing="trailing"), min(steps, total)
        )
        assert len(timesteps) == min(steps, total)
        assert timesteps[0] == total - 1
        assert timesteps[-1] >= 0


@given(
    total=st.integers(1, 2000),
    data=st.data(),
    spacing=st.sampled_from(["leading", "trailing", "linspace"]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_timesteps_descend_within_the_training(total, data, spacing):
    steps = data.draw(st.integers(1, total))
    timesteps = spaced_timesteps(DDPMConfig(num_train_timesteps=total, timestep_spacing=spacing), steps)
    assert timesteps.dtype == torch.int64
    assert len(timesteps) == steps
    assert (timesteps.diff() < 0).all()
    assert 0 <= timesteps[-1] <= timesteps[0] < total


REFUSED_TIMESTEPS = {
    "empty": ([], "at least one"),
    "fractions": ([2.0, 1.0], "whole numbers"),
    "ascending": ([1, 2], "do not descend"),
    "repeated": ([5, 5, 1], "do not descend"),
    "past-the-training": ([1000, 3], "timesteps 1000 to 3 are outside the training's 999 to 0"),
    "negative": ([3, -1], "timesteps 3 to -1 are outside"),
    "nested": ([[3, 1]], "not a list"),
}


@pytest.mark.parametrize(("timesteps", "message"), REFUSED_TIMESTEPS.values(), ids=REFUSED_TIMESTEPS)
def test_custom_timesteps_that_cannot_be(timesteps, message):
    with pytest.raises(InputError, match=message):
        DDPMScheduler().set_timesteps(timesteps=timesteps)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_custom_timesteps_of_any_kind(kind):
    assert custom_timesteps(DDPMConfig(), kind([7, 3, 1])).tolist() == [7, 3, 1]


@pytest.mark.parametrize("given", [{}, {"num_inference_steps": 5, "timesteps": [3]}], ids=["neither", "both"])
def test_either_steps_or_timesteps(given):
    with pytest.raises(InputError, match="either num_inference_steps or timesteps"):
        DDPMScheduler().set_timesteps(**given)

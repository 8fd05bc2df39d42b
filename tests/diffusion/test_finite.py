"""The error of a run with a non-finite state names the step."""

import math
from types import SimpleNamespace

import pytest
import torch

from fastdiff.diffusion.finite import Extremes
from fastdiff.errors import NonFiniteError


class Timesteps(SimpleNamespace):
    """The part of a schedule that `Extremes` reads."""

    def __len__(self) -> int:
        return len(self.timesteps)


@pytest.fixture(params=[False, True], ids=["plain", "inference-mode"])
def extremes(request):
    """A run that begins in this mode and takes its steps outside it."""
    with torch.inference_mode(request.param):
        return Extremes(Timesteps(timesteps=torch.tensor([900, 600, 300, 0])), torch.device("cpu"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_step_that_is_not_finite_is_named(extremes, value):
    x = torch.full((2, 4, 4, 3), -3e38)  # a sum of these would overflow
    for step in range(4):
        if step == 2:
            x[1, 3, 3, 2] = value
        extremes.note(step, x)
    message = r"at step 3 of 4 \(timestep 300\); try --dtype float32"
    with pytest.raises(NonFiniteError, match=message), extremes.naming_step():
        raise NonFiniteError("pictures")


def test_no_step_is_named_where_all_are_finite(extremes):
    """The VAE may be at fault. Steps that were not taken are not at fault either."""
    extremes.note(0, torch.full((1, 4, 4, 3), 3e38))
    with pytest.raises(NonFiniteError, match=r"^the VAE's output$"), extremes.naming_step():
        raise NonFiniteError("the VAE's output")


def test_a_step_that_nobody_looked_at_may_be_the_first(extremes):
    x = torch.zeros(1, 4, 4, 3)
    extremes.note(0, x)
    extremes.note(3, x / 0)
    with pytest.raises(NonFiniteError, match="at or before step 4 of 4"), extremes.naming_step():
        raise NonFiniteError("pictures")

"""DPM2 (Karras et al. 2022, arXiv 2206.00364, algorithm 2), as in diffusers' KDPM2DiscreteScheduler.

A step calls the model twice. The first call follows the tangent d = (x - x0) / sigma to the geometric mean of this
sigma and the next one. The second call computes the tangent there, and the step follows it from its beginning to the
next sigma. The step to sigma zero makes only the first call.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.kinds import Fraction
from fastdiff.samplers.shared.counted import NoiselessScheduler
from fastdiff.samplers.shared.options import SpacedSigmaConfig
from fastdiff.samplers.shared.schedule import stack_sigma_columns
from fastdiff.samplers.shared.sigma_scheduler import ScaledScheduler
from fastdiff.samplers.shared.sigmas import (
    float_sigmas,
    float_timesteps,
    sigma_x0_columns,
    tangent_columns,
    timesteps_of,
    training_sigmas,
)
from fastdiff.samplers.shared.timesteps import checked_steps


@dataclass(frozen=True, kw_only=True)
class DPM2Config(SpacedSigmaConfig):
    """The options of diffusers' KDPM2DiscreteScheduler."""

    beta_start: Fraction = 0.00085
    beta_end: Fraction = 0.012
    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"


class DPM2Sigmas(NamedTuple):
    """The noise levels of a run's steps, (steps,) float32 each."""

    start: Tensor  # of a step's first call
    middle: Tensor  # of its second call; zero for the last step, which makes one call
    end: Tensor  # where its second call ends
    noise: Tensor  # the standard deviation of the noise that the second call adds

    @property
    def seen(self) -> Tensor:
        """The sigmas at which the model is called, (2 * steps - 1,)."""
        return torch.stack([self.start, self.middle], dim=1).flatten()[:-1]


def log_middle(sigmas: Tensor, others: Tensor) -> Tensor:
    """Return the geometric means of sigmas. The last is zero, because the last step ends there."""
    means = sigmas.log().lerp(others.log(), 0.5).exp()
    return torch.cat([means[:-1], torch.zeros(1)])


def dpm2_rows(config: DPM2Config, sigmas: DPM2Sigmas) -> Tensor:
    """Return a row for each call, (2 * steps - 1, len(COLUMNS)) float32.

    Raises InputError that names a call without a solution.
    """
    start, middle, end, noise = (each.double() for each in sigmas)
    zero, one = torch.zeros_like(start), torch.ones_like(start)

    def calls(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], dim=1).flatten()[:-1]

    sigma, way, first = sigmas.seen.double(), calls(middle - start, end - start), calls(one, zero)
    tangent = tangent_columns(config.prediction_type, sigma)
    columns = sigma_x0_columns(config.prediction_type, sigma) | {
        "prev_x": first + way * tangent["keep_x"],
        "prev_m": way * tangent["keep_m"],
        "prev_y": 1 - first,  # a second call steps from where the first call began
        "y_x": first,
        "y_s": 1 - first,
        "sigma": calls(zero, noise),
    }
    return stack_sigma_columns(columns, sigma)


class TwoCallScheduler(ScaledScheduler):
    """A sampler whose steps, all but the last, call the model twice. `timesteps` has 2n - 1 for a run of n steps."""

    order = 2
    multistep = True
    rounds_to_output = False
    _options: DPM2Config
    _levels: DPM2Sigmas  # of the run

    def set_timesteps(
        self,
        num_inference_steps: int,
        device: torch.device | str | None = None,
        num_train_timesteps: int | None = None,
    ) -> None:
        """Set the number of steps of a run, and make `timesteps` on `device`.

        Raises InputError unless the number is from 1 to the number of training timesteps, if `steps_offset` moves a
        timestep outside them, and for a `num_train_timesteps` that differs from the config's.
        """
        if num_train_timesteps not in (None, len(self)):
            raise InputError(f"num_train_timesteps: the config has {len(self)}; leave it out, or change the config")
        steps = checked_steps(self._options, num_inference_steps)
        own = float_timesteps(self._options, steps)
        timesteps, sigmas = float_sigmas(self._options, self.alphas_cumprod, own)
        if self._options.sigma_spacing == "karras":
            timesteps = timesteps.round()
        self._levels = self._make_levels(sigmas)
        log_sigmas = training_sigmas(self.alphas_cumprod).log().numpy()
        between = timesteps_of(self._levels.middle.numpy(), log_sigmas).astype(np.float32)
        calls = torch.stack([timesteps, torch.from_numpy(between)], dim=1).flatten()[:-1]
        # as in diffusers, so that add_noise finds the sigma of a first call at its index
        self._choose(calls, torch.cat([sigmas[:1], sigmas[1:].repeat_interleave(2), sigmas[-1:]]), device)
        self.num_inference_steps = steps

    def _make_levels(self, sigmas: Tensor) -> DPM2Sigmas:
        """Return the noise levels of the steps between sigmas (steps + 1,) float32."""
        raise NotImplementedError

    def _input_sigma(self, index: int) -> Tensor:
        return self._levels.seen[index]

    def _make_table(self, begin: int) -> Tensor:
        if begin % 2 == 1:
            raise InputError(f"a loop cannot begin at index {begin}, the second call of a step; use an even index")
        return dpm2_rows(self._options, self._levels)


class KDPM2DiscreteScheduler(TwoCallScheduler, NoiselessScheduler):
    """DPM2 (Karras et al. 2022), with the interface of diffusers' `KDPM2DiscreteScheduler`.

    `DPM2Config` lists its options, which have diffusers' names and defaults. Each step but the last calls the model
    twice, so a run of n steps has 2n - 1 `timesteps`.
    """

    names: ClassVar = {
        "dpm2": {},
        "dpm2-karras": {"use_karras_sigmas": True, "use_exponential_sigmas": False, "use_beta_sigmas": False},
    }
    a1111_names: ClassVar = {"dpm2": "DPM2"}
    place: ClassVar = 6.1
    config_class = DPM2Config

    def _make_levels(self, sigmas: Tensor) -> DPM2Sigmas:
        start, end = sigmas[:-1], sigmas[1:]
        return DPM2Sigmas(start, log_middle(end, start), end, torch.zeros_like(end))

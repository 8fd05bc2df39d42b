"""DistilledScheduler, the base of samplers that run a few of the timesteps that a model was distilled at."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.kinds import Fraction
from fastdiff.samplers.shared.counted import CountedScheduler
from fastdiff.samplers.shared.options import DistilledConfig
from fastdiff.samplers.shared.sigmas import Array
from fastdiff.samplers.shared.timesteps import checked_steps, custom_timesteps
from fastdiff.schema import checked, whole


def distilled_timesteps(config: DistilledConfig, original_steps: int | None, strength: float) -> Array:
    """Return the timesteps that a model was distilled at, ascending, (original_steps * strength,) int64.

    Args:
        config: The scheduler's options.
        original_steps: How many timesteps the model was distilled at; None: the config's original_inference_steps.
        strength: The fraction of them to return, beginning with the least noisy.

    Raises InputError for more original steps than training steps.
    """
    total = config.num_train_timesteps
    original = config.original_inference_steps if original_steps is None else original_steps
    if original > total:
        raise InputError(f"original_inference_steps is {original}; it must be at most the {total} training steps")
    return np.arange(1, int(original * strength) + 1) * (total // original) - 1


class DistilledScheduler(CountedScheduler):
    """A sampler of consistency models. All its steps but the last can add noise."""

    rounds_to_output = False
    _options: DistilledConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        original_inference_steps: int | None = None,
        timesteps: Sequence[int] | None = None,
        strength: float = 1.0,
    ) -> None:
        """Set the steps of a run: their number, or custom `timesteps` in descending order.

        Args:
            num_inference_steps: The number of steps.
            device: The device of `timesteps`.
            original_inference_steps: Replaces the config's original_inference_steps.
            timesteps: Custom timesteps instead of a number.
            strength: 0 to 1. Below 1 the run leaves out the noisiest timesteps, as image-to-image pipelines do.

        Raises InputError unless exactly one of `num_inference_steps` and `timesteps` is given, and for more steps than
        there are distilled timesteps.
        """
        strength = checked("strength", strength, Fraction)
        original = checked("original_inference_steps", original_inference_steps, whole(1, len(self)) | None)
        if (num_inference_steps is None) == (timesteps is None):
            raise InputError("give one of num_inference_steps and timesteps")
        if timesteps is None:
            steps = checked_steps(self._options, num_inference_steps)
            chosen = self._spread(steps, original, strength)
        else:
            chosen = custom_timesteps(self._options, timesteps)
            steps = len(chosen)
            chosen = chosen[steps - int(steps * strength) :]
            if not len(chosen):
                raise InputError(f"strength {strength:g} leaves none of {steps} timesteps; increase either")
        self._begin_run(chosen, device)
        self.num_inference_steps = steps

    def _distilled(self, original_steps: int | None, strength: float) -> Array:
        """Return the timesteps that a run chooses from, ascending, (timesteps,) int64."""
        return distilled_timesteps(self._options, original_steps, strength)

    def _spread(self, steps: int, original_steps: int | None, strength: float) -> Tensor:
        """Return a run's timesteps, descending, evenly spaced over those it chooses from: (steps,) int64."""
        distilled = self._distilled(original_steps, strength)
        original = self._options.original_inference_steps if original_steps is None else original_steps
        most = min(len(distilled), original)
        if steps > most:
            raise InputError(
                f"num_inference_steps is {steps}; {original} original_inference_steps at strength {strength:g} allow"
                f" {most}; use fewer steps"
            )
        places = np.floor(np.linspace(0, len(distilled), num=steps, endpoint=False)).astype(np.int64)
        return torch.from_numpy(distilled[::-1][places].astype(np.int64))

    @property
    def _last(self) -> int:
        """The step that adds no noise: the run's last. It is not taken if `strength` cut custom timesteps."""
        return (self.num_inference_steps or len(self.timesteps)) - 1

    def _draws(self, index: int) -> bool:
        return index != self._last

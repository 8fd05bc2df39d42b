"""LCMScheduler: latent consistency models, called as diffusers' class of this name. Its rows: `samplers/lcm.py`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from fastdiff.diffusion.configs import LCMConfig
from fastdiff.diffusion.noise import randn_tensor
from fastdiff.diffusion.samplers.lcm import boundary_scalings, lcm_rows, lcm_schedule, lcm_timesteps
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.counted import CountedScheduler
from fastdiff.diffusion.timesteps import checked_steps, custom_timesteps
from fastdiff.errors import InputError
from fastdiff.kinds import Fraction
from fastdiff.schema import checked, whole


class LCMSchedulerOutput(NamedTuple):
    """The result of a step, as diffusers' class of this name; both (N, C, ...)."""

    prev_sample: Tensor  # x_{t-1}
    denoised: Tensor  # the picture that the model says


class LCMScheduler(CountedScheduler):
    """Latent consistency models (Luo et al. 2023), called as diffusers' LCMScheduler. Its options: LCMConfig."""

    config_class = LCMConfig
    rounds_to_output = False
    _options: LCMConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        original_inference_steps: int | None = None,
        timesteps: Sequence[int] | None = None,
        strength: float = 1.0,
    ) -> None:
        """Choose the steps of a run: their number, or custom `timesteps` in descending order.

        `original_inference_steps` replaces the config's. `strength` from 0 to 1 leaves the noisiest of them out, as
        image to image does. Raises InputError unless one of the two is given, and for more steps than there are.
        """
        strength = checked("strength", strength, Fraction)
        original = checked("original_inference_steps", original_inference_steps, whole(1, len(self)) | None)
        if (num_inference_steps is None) == (timesteps is None):
            raise InputError("give one of num_inference_steps and timesteps")
        if timesteps is None:
            steps = checked_steps(self._options, num_inference_steps)
            chosen = lcm_timesteps(self._options, steps, original, strength)
        else:
            chosen = custom_timesteps(self._options, timesteps)
            steps = len(chosen)
            chosen = chosen[steps - int(steps * strength) :]
            if not len(chosen):
                raise InputError(f"strength {strength:g} leaves none of {steps} timesteps; give more of either")
        self._begin_run(chosen, device)
        self.num_inference_steps = steps
        self._scalings = torch.stack(boundary_scalings(self._options, chosen), dim=1).tolist()

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return lcm_schedule(self._options, num_inference_steps)

    @property
    def _last(self) -> int:
        """The step that adds no noise: the run's last, but of custom timesteps that `strength` cut, as in diffusers."""
        return (self.num_inference_steps or len(self.timesteps)) - 1

    def _make_table(self, begin: int) -> Tensor:
        return lcm_rows(self._options, self.alphas_cumprod, self.timesteps.cpu(), self._last)

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> LCMSchedulerOutput | tuple[Tensor, ...]:
        """Return x_{t-1} and the denoised picture of x_t and the model output, both (N, C, ...) of any float dtype.

        Raises InputError naming a timestep that is not of the run, or a tensor of a wrong kind, shape or dtype.
        """
        index = self._checked_index(timestep, sample, generator, return_dict, model_output)
        dtype = torch.promote_types(model_output.dtype, sample.dtype)
        noise = None
        if index != self._last:
            noise = randn_tensor(model_output.shape, generator, sample.device, dtype)
        x_prev, x0 = self._take(model_output, sample, noise, return_dict=False)
        c_skip, c_out = self._scalings[index]
        result = LCMSchedulerOutput(x_prev, (c_out * x0 + c_skip * sample).to(dtype))
        return result if return_dict else tuple(result)

"""DDPMScheduler: ancestral sampling, called as diffusers' class of this name. Its rows: `samplers/ddpm.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from fastdiff.diffusion.configs import DDPMConfig
from fastdiff.diffusion.noise import randn_tensor
from fastdiff.diffusion.samplers.ddpm import ddpm_rows, ddpm_schedule
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.base import Scheduler, SchedulerOutput
from fastdiff.diffusion.timesteps import chosen_timesteps, following_in_list
from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.schema import checked, whole


class DDPMScheduler(Scheduler):
    """Ancestral sampling (Ho et al. 2020), called as diffusers' DDPMScheduler. Its options: DDPMConfig."""

    config_class = DDPMConfig
    _options: DDPMConfig

    def _build(self, mapping: Mapping[str, Any]) -> None:
        super()._build(mapping)
        self._spaced = False  # whether set_timesteps made the timesteps

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Choose the steps of a run: their number, or custom `timesteps` in descending order.

        Raises InputError unless one of them is given, or where they leave the training's.
        """
        device = None if device is None else resolve_device(device)
        self.timesteps = chosen_timesteps(self._options, num_inference_steps, timesteps).to(device)
        if num_inference_steps is not None:
            self.num_inference_steps = len(self.timesteps)
        self._spaced = True

    def _make_schedule(self, num_inference_steps: int) -> Schedule:
        return ddpm_schedule(self._options, num_inference_steps)

    def previous_timestep(self, timestep: int | Tensor) -> int:
        """Return the timestep that a step goes to: the next of `timesteps` once they are set, -1 after the last."""
        t = checked("timestep", timestep, whole(0, len(self) - 1))
        chain, following = self._chain(t)
        return int(following[chain == t])

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, Tensor]:
        """Return x_{t-1} and x0 of x_t and the model output, both (N, C, ...); a learned variance is C more channels.

        Any float dtype; the arithmetic is float32 or more. Without a prior `set_timesteps` it goes to timestep - 1.
        Raises InputError naming a timestep that cannot be stepped from, or a tensor of a wrong kind, shape or dtype.
        """
        t = self._checked_step(timestep, sample, generator, return_dict, model_output=model_output)
        row = self._row(t, sample.device)
        noise = None if t == 0 else randn_tensor(sample.shape, generator, sample.device, model_output.dtype)
        return self._advance(model_output, sample, row, noise, return_dict)

    def _chain(self, timestep: int) -> tuple[Tensor, Tensor]:
        """Return the timesteps of the run that `timestep` is in and where each step goes to."""
        if not self._spaced:
            return torch.tensor([timestep]), torch.tensor([timestep - 1])
        chain = self.timesteps.cpu()
        if not (chain == timestep).any():
            raise InputError(f"timestep {timestep} is not one of the scheduler's timesteps; call set_timesteps for it")
        return chain, following_in_list(chain)

    def _make_rows(self, timestep: int, *options: float) -> tuple[Tensor, Tensor]:
        chain, following = self._chain(timestep)
        return chain, ddpm_rows(self._options, self.alphas_cumprod, chain, following)

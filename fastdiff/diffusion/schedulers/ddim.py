"""DDIMScheduler: implicit models, called as diffusers' class of this name. Its rows: `samplers/ddim.py`."""

import torch
from torch import Generator, Tensor

from fastdiff.diffusion.configs import DDIMConfig
from fastdiff.diffusion.noise import randn_tensor
from fastdiff.diffusion.samplers.ddim import ddim_rows, ddim_schedule
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers.base import Scheduler, SchedulerOutput
from fastdiff.diffusion.timesteps import following_by_stride, spaced_timesteps
from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.kinds import NotNegative
from fastdiff.schema import checked


class DDIMScheduler(Scheduler):
    """Implicit models (Song et al. 2021), called as diffusers' DDIMScheduler. Its options: DDIMConfig."""

    config_class = DDIMConfig
    _options: DDIMConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run. Raises InputError for one that the training does not have."""
        device = None if device is None else resolve_device(device)
        self.timesteps = spaced_timesteps(self._options, num_inference_steps).to(device)
        self.num_inference_steps = len(self.timesteps)

    def _schedule(self, num_inference_steps: int, eta: float, use_clipped_model_output: bool) -> Schedule:
        return ddim_schedule(
            self._options, num_inference_steps, eta=eta, use_clipped_model_output=use_clipped_model_output
        )

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        eta: float = 0.0,
        use_clipped_model_output: bool | None = False,
        generator: Generator | list[Generator] | None = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, Tensor]:
        """Return x_{t-1} and x0 of x_t and the model output, both (N, C, ...) of any float dtype.

        The arithmetic is float32 or more. `variance_noise` (N, C, ...) replaces the noise that eta > 0 draws.
        Raises InputError naming a timestep that cannot be stepped from, or a tensor of a wrong kind, shape or dtype.
        """
        self._steps()
        given = {} if variance_noise is None else {"variance_noise": variance_noise}
        t = self._checked_step(timestep, sample, generator, return_dict, model_output=model_output, **given)
        if variance_noise is not None and variance_noise.shape != sample.shape:
            shapes = tuple(variance_noise.shape), tuple(sample.shape)
            raise InputError(f"variance_noise has shape {shapes[0]}; the sample has {shapes[1]}; give both the same")
        eta = checked("eta", eta, NotNegative)
        clipped = bool(checked("use_clipped_model_output", use_clipped_model_output, bool | None))
        if eta > 0 and variance_noise is not None and generator is not None:
            raise InputError("generator and variance_noise both say what the noise is; give one of them")
        row = self._row(t, sample.device, eta, clipped)
        noise = variance_noise if eta > 0 else None
        if eta > 0 and noise is None:
            noise = randn_tensor(sample.shape, generator, sample.device, model_output.dtype)
        return self._advance(model_output, sample, row, noise, return_dict)

    def _steps(self) -> int:
        if self.num_inference_steps is None:
            raise InputError("the number of steps is not set; call set_timesteps before step")
        return self.num_inference_steps

    def _make_rows(self, timestep: int, *options: float) -> tuple[Tensor, Tensor]:
        eta, use_clipped_model_output = options
        chain = self.timesteps.cpu()
        if not (chain == timestep).any():  # diffusers steps from any timestep
            chain = torch.tensor([timestep])
        following = following_by_stride(self._options, chain, self._steps())
        return chain, ddim_rows(
            self._options, self.alphas_cumprod, chain, following, eta, bool(use_clipped_model_output)
        )

"""DDIM: the sampler of Song et al. 2021 (arXiv 2010.02502), as diffusers' DDIMScheduler.

x_{t-1} = sqrt(alpha_bar') x0 + sqrt(1 - alpha_bar' - sigma^2) eps + sigma z

(eq. 12), where alpha_bar' belongs to the timestep that the step goes to and sigma is eta times the deviation of DDPM's
posterior (eq. 16): eta 0 is deterministic, eta 1 has DDPM's variance.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.kinds import NotNegative
from fastdiff.samplers.shared.marginals import Marginals, x0_columns
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import ClippingConfig, ThresholdingConfig, ZeroSNRConfig
from fastdiff.samplers.shared.schedule import Schedule, stack_columns
from fastdiff.samplers.shared.scheduler import Scheduler, SchedulerOutput
from fastdiff.samplers.shared.timesteps import following_by_stride, spaced_timesteps
from fastdiff.schema import checked


@dataclass(frozen=True, kw_only=True)
class DDIMConfig(ClippingConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' DDIMScheduler."""

    set_alpha_to_one: bool = True  # the alpha_bar after the last step is 1, else that of timestep 0


def ddim_rows(
    config: DDIMConfig,
    alpha_bar: Tensor,
    timesteps: Tensor,
    following: Tensor,
    eta: float,
    use_clipped_model_output: bool,
) -> Tensor:
    """Return a row for each step from `timesteps` to `following`, (steps, len(COLUMNS)) float32.

    `alpha_bar` comes from `make_alpha_bar`. Both timesteps are (steps,) int64; a negative one is the picture itself.
    Raises InputError naming the option that leaves a step undefined.
    """
    p = Marginals.between(alpha_bar, timesteps, following, 1.0 if config.set_alpha_to_one else alpha_bar[0].item())
    # in float32 as diffusers, see `Marginals`: where sigma takes all of beta_bar_prev, what is left is roundings
    sigma = eta * p.variance.float() ** 0.5
    squared = p.beta_bar_prev.float() - sigma**2
    if (squared < -1e-6).any():  # more than a rounding
        raise InputError(f"eta is {eta}, more noise than the next timestep has; use eta from 0 to 1")
    direction = squared.clamp(min=0).double().sqrt()  # of eps in x_{t-1}
    columns = x0_columns(config.prediction_type, p) | {"prev_x0": p.alpha_bar_prev.sqrt(), "sigma": sigma.double()}
    if use_clipped_model_output:  # eps = (x_t - signal * x0) / noise, of the clipped x0
        columns["prev_x0"] = columns["prev_x0"] - direction * p.signal / p.noise
        columns["prev_x"] = direction / p.noise
    elif config.prediction_type == "epsilon":
        columns["prev_m"] = direction
    elif config.prediction_type == "sample":  # the same eps, of the x0 before clipping
        columns["prev_x"], columns["prev_m"] = direction / p.noise, -direction * p.signal / p.noise
    else:  # eps = signal * v + noise * x_t
        columns["prev_x"], columns["prev_m"] = direction * p.noise, direction * p.signal
    return stack_columns(columns, config, timesteps, p.alpha_bar)


class DDIMScheduler(Scheduler):
    """Implicit models (Song et al. 2021), called as diffusers' DDIMScheduler. Its options: DDIMConfig."""

    names: ClassVar = {"ddim": {}}
    place: ClassVar = 1
    config_class = DDIMConfig
    _options: DDIMConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the number of steps of a run. Raises InputError for one that the training does not have."""
        device = None if device is None else resolve_device(device)
        self.timesteps = spaced_timesteps(self._options, num_inference_steps).to(device)
        self.num_inference_steps = len(self.timesteps)

    def _schedule(self, num_inference_steps: int, eta: float, use_clipped_model_output: bool) -> Schedule:
        loop = self._loop(num_inference_steps)
        chain, rows = loop._make_rows(int(loop.timesteps[0]), eta, use_clipped_model_output)
        return Schedule(chain, rows, self._step_options, (eta > 0,) * len(chain))

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

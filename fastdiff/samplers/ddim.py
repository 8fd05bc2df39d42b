"""DDIM: the sampler of Song et al. 2021 (arXiv 2010.02502), as in diffusers' DDIMScheduler.

A step is (eq. 12)::

    x_{t-1} = sqrt(alpha_bar') x0 + sqrt(1 - alpha_bar' - sigma^2) eps + sigma z

alpha_bar' belongs to the step's target timestep. sigma is eta times the standard deviation of DDPM's posterior
(eq. 16): eta 0 is deterministic, and eta 1 has DDPM's variance.
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

    set_alpha_to_one: bool = True  # alpha_bar after the last step: 1, or the one at timestep 0


def ddim_rows(
    config: DDIMConfig,
    alpha_bar: Tensor,
    timesteps: Tensor,
    following: Tensor,
    eta: float,
    use_clipped_model_output: bool,
) -> Tensor:
    """Return a row for each step from `timesteps` to `following`, (steps, len(COLUMNS)) float32.

    `alpha_bar` comes from `make_alpha_bar`. `timesteps` and `following` are (steps,) int64; a negative timestep stands
    for the clean picture. Raises InputError that names the option that leaves a step undefined.
    """
    p = Marginals.between(alpha_bar, timesteps, following, 1.0 if config.set_alpha_to_one else alpha_bar[0].item())
    # in float32 as in diffusers, see `Marginals`. If sigma^2 equals beta_bar_prev, only rounding errors remain
    sigma = eta * p.variance.float() ** 0.5
    squared = p.beta_bar_prev.float() - sigma**2
    if (squared < -1e-6).any():  # more than a rounding error
        raise InputError(f"eta is {eta}, more noise than the next timestep has; use eta from 0 to 1")
    direction = squared.clamp(min=0).double().sqrt()  # the coefficient of eps in x_{t-1}
    columns = x0_columns(config.prediction_type, p) | {"prev_x0": p.alpha_bar_prev.sqrt(), "sigma": sigma.double()}
    if use_clipped_model_output:  # eps = (x_t - signal * x0) / noise, with the clipped x0
        columns["prev_x0"] = columns["prev_x0"] - direction * p.signal / p.noise
        columns["prev_x"] = direction / p.noise
    elif config.prediction_type == "epsilon":
        columns["prev_m"] = direction
    elif config.prediction_type == "sample":  # the same eps, with the x0 before clipping
        columns["prev_x"], columns["prev_m"] = direction / p.noise, -direction * p.signal / p.noise
    else:  # eps = signal * v + noise * x_t
        columns["prev_x"], columns["prev_m"] = direction * p.noise, direction * p.signal
    return stack_columns(columns, config, timesteps, p.alpha_bar)


class DDIMScheduler(Scheduler):
    """The DDIM sampler (Song et al. 2021), with the interface of diffusers' `DDIMScheduler`.

    `DDIMConfig` lists its options, which have diffusers' names and defaults. Steps are deterministic unless `step`, or
    the pipeline's call, gets an `eta` above 0.
    """

    names: ClassVar = {"ddim": {}}
    place: ClassVar = 1
    default_eta: ClassVar = 0.0
    config_class = DDIMConfig
    _options: DDIMConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Set the number of steps of a run, and make `timesteps` on `device`.

        Raises InputError unless the number is from 1 to the number of training timesteps, and if `steps_offset` moves a
        timestep outside them.
        """
        device = None if device is None else resolve_device(device)
        self.timesteps = spaced_timesteps(self._options, num_inference_steps).to(device)
        self.num_inference_steps = len(self.timesteps)

    def _schedule(self, eta: float | None, use_clipped_model_output: bool) -> Schedule:
        eta = self.default_eta if eta is None else eta
        chain, rows = self._make_rows(int(self.timesteps[0]), eta, use_clipped_model_output)
        return Schedule(chain, rows, self._step_options, (eta > 0,) * len(chain))

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        eta: float = default_eta,
        use_clipped_model_output: bool | None = False,
        generator: Generator | list[Generator] | None = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, Tensor]:
        """Take one step: return `x_{t-1}` and the predicted `x0`, both (N, C, ...).

        The arithmetic runs in float32, or in float64 for a float64 sample. The results have the wider dtype of
        `model_output` and `sample`.

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            eta: The amount of noise, from 0 (deterministic) to 1 (DDPM's variance).
            use_clipped_model_output: Recompute eps from the clipped `x0`.
            generator: Draws the noise: one generator for the batch, or a list with one for each picture.
            variance_noise: Noise (N, C, ...) to use instead of drawing it. Only used if `eta` is above 0.
            return_dict: Return a `SchedulerOutput` instead of a plain tuple.

        Raises InputError that names an invalid timestep, or a tensor of a wrong type, shape or dtype.
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
            raise InputError("generator and variance_noise exclude each other; give one of them")
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

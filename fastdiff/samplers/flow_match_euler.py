"""Euler's method for flow matching (Lipman et al. 2022, arXiv 2210.02747), as in FlowMatchEulerDiscreteScheduler.

A flow mixes x = (1 - sigma) x_0 + sigma eps, and the model predicts its velocity v = eps - x_0. A step follows it::

    x_next = x + (sigma_next - sigma) v

Stochastic sampling mixes the predicted x_0 with fresh noise instead, x_next = (1 - sigma_next) x_0 + sigma_next z. A
shift moves the sigmas towards the noise (Esser et al. 2024, arXiv 2403.03206, section 5.3.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Generator, Tensor

from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.execution.tensors import REAL, beside, tensor
from fastdiff.kinds import PositiveNumber
from fastdiff.samplers.shared.flow import Mu, shifted
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import SpacedConfig
from fastdiff.samplers.shared.schedule import stack_sigma_columns
from fastdiff.samplers.shared.sigma_scheduler import SigmaScheduler
from fastdiff.samplers.shared.sigmas import Array, spaced_sigmas, stretched, time_shifted
from fastdiff.samplers.shared.timesteps import checked_steps, custom_numbers
from fastdiff.schema import checked


@dataclass(frozen=True, kw_only=True)
class FlowMatchEulerConfig(SpacedConfig):
    """The options of diffusers' FlowMatchEulerDiscreteScheduler."""

    shift: PositiveNumber = 1.0
    use_dynamic_shifting: bool = False  # `mu` of a run replaces shift
    base_shift: float | None = 0.5  # this and the next three: for a caller who computes mu from the picture's size
    max_shift: float | None = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    invert_sigmas: bool = False  # from the picture to the noise
    shift_terminal: float | None = None  # the sigmas are stretched to end here
    time_shift_type: Literal["exponential", "linear"] = "exponential"  # of mu
    stochastic_sampling: bool = False


def flow_rows(config: FlowMatchEulerConfig, sigmas: Tensor) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32. (steps, len(COLUMNS)) float32."""
    sigma, following = sigmas[:-1].double(), sigmas[1:].double()
    one = torch.ones_like(sigma)
    columns = {"x0_x": one, "x0_m": -sigma, "x0_div": one}
    if config.stochastic_sampling:
        columns |= {"prev_x0": 1 - following, "sigma": following}
    else:
        columns |= {"prev_x": one, "prev_m": following - sigma}
    return stack_sigma_columns(columns, sigma)


class FlowMatchEulerDiscreteSchedulerOutput(NamedTuple):
    """The result of a step, as in diffusers' class of this name."""

    prev_sample: Tensor  # x_{t-1}, (N, C, ...)


class FlowMatchEulerDiscreteScheduler(SigmaScheduler):
    """Euler's method for flow matching, with the interface of diffusers' `FlowMatchEulerDiscreteScheduler`.

    `FlowMatchEulerConfig` lists its options, which have diffusers' names and defaults. The model must predict the
    velocity of a flow.
    """

    names: ClassVar = {"flow-euler": {}}
    place: ClassVar = 12
    follows_flow = True
    config_class = FlowMatchEulerConfig  # type: ignore[assignment]  # it has no betas
    returns_x0 = False
    noise_dtype = torch.float32
    _options: FlowMatchEulerConfig  # type: ignore[assignment]

    def _make_process(self) -> None:
        self._shift = self._options.shift
        levels = np.linspace(1, len(self), len(self), dtype=np.float32)[::-1] / len(self)
        if not self._options.use_dynamic_shifting:
            levels = shifted(levels, self._shift)
        self.sigmas = torch.from_numpy(levels.copy())
        self.timesteps = self.sigmas * len(self)
        self.sigma_min, self.sigma_max = self.sigmas[-1].item(), self.sigmas[0].item()

    @property
    def shift(self) -> float:
        """The shift of runs without dynamic shifting: the config's, or the last one that `set_shift` set."""
        return self._shift

    def set_shift(self, shift: float) -> None:
        """Set the shift of later runs. Raises InputError unless it is above 0."""
        self._shift = checked("shift", shift, PositiveNumber)

    def time_shift(self, mu: float, sigma: float, t: Any) -> Any:
        """Return times `t` (...) moved towards the noise by exp(mu), or by mu if time_shift_type is linear.

        `sigma` is the exponent of 1 / t - 1. The times are a numpy array, a tensor or a number.
        """
        ratio = math.exp(mu) if self._options.time_shift_type == "exponential" else mu
        return time_shifted(t, ratio, sigma)

    def stretch_shift_to_terminal(self, t: Any) -> Any:
        """Return times `t` (steps,) stretched so that the last one is the config's shift_terminal."""
        if not self._options.shift_terminal:
            raise InputError("shift_terminal is not set; set it in the config")
        return stretched(t, self._options.shift_terminal)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """Set the steps of a run: their number, or custom `sigmas` or `timesteps`, which may come together.

        Args:
            num_inference_steps: The number of steps.
            device: The device of `timesteps` and `sigmas`.
            sigmas: Custom sigmas from at most 1 down to at least 0, without the one after the last step. The shift
                moves them.
            mu: The amount of the shift with use_dynamic_shifting; otherwise not read.
            timesteps: What the model gets, from at most num_train_timesteps down to 0. Without `sigmas`, they also
                determine the sigmas.

        Raises InputError for steps that do not fit together, for use_dynamic_shifting without `mu`, and for values out
        of range.
        """
        given, own = self._given(num_inference_steps, sigmas, timesteps)
        levels = given / len(self) if own is None else own
        chosen = torch.from_numpy(self._moved(levels, mu)).float()
        if not chosen.isfinite().all():
            raise InputError("these options give sigmas that are not finite; use other sigmas, shift or shift_terminal")
        told = chosen * len(self) if timesteps is None else torch.from_numpy(given)
        if self._options.invert_sigmas:
            chosen = 1.0 - chosen
            told = chosen * len(self)
        chosen = torch.cat([chosen, torch.full((1,), float(self._options.invert_sigmas))])
        self._choose(told, chosen if device is None else chosen.to(resolve_device(device)), device)

    def _moved(self, sigmas: Array, mu: Any) -> Array:
        """Return sigmas (steps,) shifted, stretched and spaced as the config says."""
        options = self._options
        if not options.use_dynamic_shifting:
            sigmas = shifted(sigmas, self._shift)
        elif mu is None:
            raise InputError("mu is None; give the shift that use_dynamic_shifting needs")
        else:
            kind = Mu if options.time_shift_type == "exponential" else PositiveNumber
            with np.errstate(divide="ignore"):  # 1 / t at time 0
                sigmas = self.time_shift(checked("mu", mu, kind), 1.0, sigmas)
        with np.errstate(divide="ignore", invalid="ignore"):
            sigmas = stretched(sigmas, options.shift_terminal) if options.shift_terminal else sigmas
        if options.sigma_spacing is None:
            return sigmas
        if options.sigma_spacing == "exponential" and sigmas.min() <= 0:
            raise InputError("use_exponential_sigmas takes the logarithm of sigma 0; use sigmas above 0")
        return spaced_sigmas(options.sigma_spacing, sigmas, len(sigmas))

    def _given(
        self, num_inference_steps: int | None, sigmas: Sequence[float] | None, timesteps: Sequence[float] | None
    ) -> tuple[Array, Array | None]:
        """Return the run's timesteps, spaced evenly unless given, and its custom sigmas, both (steps,)."""
        custom = {name: value for name, value in (("sigmas", sigmas), ("timesteps", timesteps)) if value is not None}
        if num_inference_steps is None and not custom:
            raise InputError("give num_inference_steps, sigmas or timesteps")
        bounds = {"sigmas": 1.0, "timesteps": float(len(self))}
        found = {name: custom_numbers(name, value, bounds[name]).astype(np.float32) for name, value in custom.items()}
        lengths = {name: len(values) for name, values in found.items()}
        if num_inference_steps is not None:
            lengths["num_inference_steps"] = checked_steps(self._options, num_inference_steps)
        if len(set(lengths.values())) > 1:
            said = " and ".join(f"{name} ({length})" for name, length in lengths.items())
            raise InputError(f"{said} differ in their number of steps; give the same number, or only one of them")
        steps = next(iter(lengths.values()))
        even = np.linspace(self.sigma_max * len(self), self.sigma_min * len(self), steps)
        return found.get("timesteps", even), found.get("sigmas")

    def _make_table(self, begin: int) -> Tensor:
        return flow_rows(self._options, self.sigmas.cpu())

    def _draws(self, index: int) -> bool:
        return self._options.stochastic_sampling

    def scale_noise(self, sample: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        """Return x = (1 - sigma) x_0 + sigma noise at timesteps (N,) of the run. Samples are (N, ...)."""
        return self._mix(sample, noise, self._sigmas_of(sample, noise, timestep))

    def _mix(self, samples: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        return sigma * noise + (1.0 - sigma) * samples

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> NoReturn:
        """Raise InputError. A flow mixes noise with `scale_noise`."""
        raise InputError(f"{type(self).__name__} has no add_noise; use scale_noise")

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = math.inf,
        s_noise: float = 1.0,
        generator: Generator | list[Generator] | None = None,
        per_token_timesteps: Tensor | None = None,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[Tensor, ...]:
        """Take one step: return `x_{t-1}` (N, C, ...) in the model output's dtype.

        Args:
            model_output: The model's velocity for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            s_churn: Not read, as in diffusers.
            s_tmin: Not read, as in diffusers.
            s_tmax: Not read, as in diffusers.
            s_noise: Not read, as in diffusers.
            generator: Draws the noise of stochastic sampling: one generator for the batch, or one for each picture.
            per_token_timesteps: The timesteps of tokens (N, L), for samples (N, L, C). Each token goes to the next
                lower sigma of the run, and the result is float32.
            return_dict: Return a `FlowMatchEulerDiscreteSchedulerOutput` instead of a plain tuple.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        index = self._checked_index(timestep, sample, generator, return_dict, model_output)
        noise = None
        if self._draws(index):
            noise = randn_tensor(sample.shape, generator, sample.device, self.noise_dtype)
        if per_token_timesteps is None:
            x_prev, *_ = self._take(model_output, sample, noise, return_dict=False)
        else:
            x_prev = self._step_tokens(model_output, sample, per_token_timesteps, noise)
            self._step_index = index + 1
        result = FlowMatchEulerDiscreteSchedulerOutput(x_prev)
        return result if return_dict else tuple(result)

    def _step_tokens(self, velocity: Tensor, sample: Tensor, timesteps: Tensor, noise: Tensor | None) -> Tensor:
        """Return x_next (N, L, C) float32 for tokens with timesteps (N, L) of their own."""
        beside("per_token_timesteps", tensor("per_token_timesteps", timesteps, REAL), sample.device)
        if timesteps.shape != sample.shape[:2] or velocity.shape != sample.shape or sample.ndim != 3:
            shapes = tuple(timesteps.shape), tuple(sample.shape)
            raise InputError(f"per_token_timesteps {shapes[0]} and sample {shapes[1]}: give (N, L) and (N, L, C)")
        sigma = timesteps / len(self)
        levels = self.sigmas.to(sample.device)[:, None, None]
        lower = (levels * (levels < sigma - 1e-6)).amax(dim=0)
        sigma, following, x = sigma[..., None], lower[..., None], sample.float()
        if noise is None:
            return x + (sigma - following) * velocity  # diffusers' sign
        return (1 - following) * (x - sigma * velocity) + following * noise

"""Euler's method (Karras et al. 2022, arXiv 2206.00364, algorithm 1), as in diffusers' EulerDiscreteScheduler.

In the paper's variables, x = x_0 + sigma * eps. A step follows the tangent (x - x0) / sigma to the next sigma::

    x_next = x + (sigma_next - sigma) (x - x0) / sigma = (sigma_next / sigma) x + (1 - sigma_next / sigma) x0

`euler_rows` puts the two coefficients into the columns `prev_x` and `prev_x0`. `sigma_x0_columns` adds the columns that
compute x0 from the model's output. `kernels/device/denoise.py` runs the rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Generator, Tensor

from fastdiff.errors import InputError
from fastdiff.kinds import NotNegative, PositiveNumber
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import FinalSigma, SpacedSigmaConfig, ZeroSNRConfig
from fastdiff.samplers.shared.schedule import stack_sigma_columns
from fastdiff.samplers.shared.scheduler import SchedulerOutput
from fastdiff.samplers.shared.sigma_scheduler import ScaledScheduler, check_chosen
from fastdiff.samplers.shared.sigmas import (
    Array,
    float_timesteps,
    sigma_x0_columns,
    sigmas_at,
    spaced_sigmas,
    timesteps_of,
    training_sigmas,
    with_final,
)
from fastdiff.samplers.shared.timesteps import checked_steps, custom_numbers
from fastdiff.schema import checked


@dataclass(frozen=True, kw_only=True)
class EulerConfig(SpacedSigmaConfig, ZeroSNRConfig):
    """The options of diffusers' EulerDiscreteScheduler."""

    interpolation_type: Literal["linear", "log_linear"] = "linear"
    sigma_min: PositiveNumber | None = None  # only read by the karras, exponential and beta spacings
    sigma_max: PositiveNumber | None = None
    final_sigmas_type: FinalSigma = "zero"
    timestep_type: Literal["discrete", "continuous"] = "discrete"

    @property
    def tells_log_sigma(self) -> bool:
        """Whether the model gets log(sigma) / 4 as timestep: for timestep_type continuous with v_prediction only."""
        return self.timestep_type == "continuous" and self.prediction_type == "v_prediction"


def euler_sigmas(config: EulerConfig, alpha_bar: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) and sigmas (steps + 1,) of a run, both float32."""
    return _finish(config, alpha_bar, float_timesteps(config, steps))


def euler_sigmas_at(config: EulerConfig, alpha_bar: Tensor, timesteps: Array) -> tuple[Tensor, Tensor]:
    """Return the same as `euler_sigmas`, for custom timesteps (steps,) float32."""
    return _finish(config, alpha_bar, timesteps)


def euler_custom_sigmas(config: EulerConfig, alpha_bar: Tensor, sigmas: Array) -> tuple[Tensor, Tensor]:
    """Return the same as `euler_sigmas`, for custom sigmas (steps + 1,) float32."""
    log_sigmas = np.log(training_sigmas(alpha_bar).numpy())
    return _told(config, torch.from_numpy(sigmas), timesteps_of(sigmas[:-1], log_sigmas))


def _finish(config: EulerConfig, alpha_bar: Tensor, timesteps: Array) -> tuple[Tensor, Tensor]:
    trained = training_sigmas(alpha_bar).numpy()
    log_sigmas = np.log(trained)
    if config.interpolation_type == "linear":
        sigmas = sigmas_at(timesteps, trained)
    else:
        sigmas = torch.linspace(log_sigmas[-1], log_sigmas[0], len(timesteps) + 1).exp().numpy()
    if config.sigma_spacing is not None:
        sigmas = spaced_sigmas(config.sigma_spacing, sigmas, len(timesteps), config.sigma_min, config.sigma_max)
        timesteps = timesteps_of(sigmas, log_sigmas)
    return _told(config, with_final(sigmas, alpha_bar, config.final_sigmas_type), timesteps)


def _told(config: EulerConfig, sigmas: Tensor, timesteps: Array) -> tuple[Tensor, Tensor]:
    if config.tells_log_sigma:
        return torch.tensor([0.25 * sigma.log() for sigma in sigmas[:-1]]), sigmas
    return torch.from_numpy(timesteps.astype(np.float32)), sigmas


def euler_rows(config: EulerConfig, sigmas: Tensor, churn: float = 1.0) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32. (steps, len(COLUMNS)) float32.

    With `churn`, a step begins at `churn` times its sigma, because noise was added to its x (algorithm 2).
    """
    sigma, following = sigmas[:-1].double(), sigmas[1:].double()
    start = sigma * churn
    columns = sigma_x0_columns(config.prediction_type, sigma, start)
    columns |= {"prev_x": following / start, "prev_x0": 1 - following / start}
    return stack_sigma_columns(columns, sigma)


class EulerDiscreteScheduler(ScaledScheduler):
    """Euler's method (Karras et al. 2022), with the interface of diffusers' `EulerDiscreteScheduler`.

    `EulerConfig` lists its options, which have diffusers' names and defaults.
    """

    names: ClassVar = {
        "euler": {},
        "euler-karras": {"use_karras_sigmas": True, "use_exponential_sigmas": False, "use_beta_sigmas": False},
    }
    a1111_names: ClassVar = {"euler": "Euler"}
    place: ClassVar = 3
    config_class = EulerConfig
    _options: EulerConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[float] | None = None,
        sigmas: Sequence[float] | None = None,
    ) -> None:
        """Set the steps of a run: their number, custom `timesteps`, or custom `sigmas`.

        Custom sigmas include the one after the last step. Raises InputError unless exactly one of the three is given,
        and for custom timesteps if the config spaces the sigmas in another way (such as use_karras_sigmas).
        """
        check_chosen(self._options, num_inference_steps=num_inference_steps, timesteps=timesteps, sigmas=sigmas)
        if timesteps is not None:
            if self._options.tells_log_sigma:
                raise InputError("timesteps: this scheduler's options allow no custom ones; give num_inference_steps")
            own = custom_numbers("timesteps", timesteps, len(self) - 1).astype(np.float32)
            chosen = euler_sigmas_at(self._options, self.alphas_cumprod, own)
        elif sigmas is not None:
            own = custom_numbers("sigmas", sigmas, count=2).astype(np.float32)
            chosen = euler_custom_sigmas(self._options, self.alphas_cumprod, own)
        else:
            chosen = euler_sigmas(self._options, self.alphas_cumprod, checked_steps(self._options, num_inference_steps))
        self._choose(*chosen, device)

    def _make_table(self, begin: int) -> Tensor:
        return euler_rows(self._options, self.sigmas)

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
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Take one step: return `x_{t-1}` and the predicted `x0`, both (N, C, ...).

        With `s_churn` above 0, the step first adds noise to the sample (Karras et al. 2022, algorithm 2).

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            s_churn: The amount of noise to add over the run; 0 adds none.
            s_tmin: The smallest sigma at which noise is added.
            s_tmax: The largest sigma at which noise is added.
            s_noise: A factor on the noise.
            generator: Draws the noise: one generator for the batch, or a list with one for each picture.
            return_dict: Return a `SchedulerOutput` instead of a plain tuple.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        index = self._checked_index(timestep, sample, generator, return_dict, model_output)
        s_churn, s_tmin, s_noise = (
            checked(name, value, NotNegative)
            for name, value in {"s_churn": s_churn, "s_tmin": s_tmin, "s_noise": s_noise}.items()
        )
        sigma = self.sigmas[index].item()
        gamma = min(s_churn / (len(self.sigmas) - 1), 2**0.5 - 1) if s_tmin <= sigma <= s_tmax else 0.0
        if gamma == 0:
            return self._take(model_output, sample, None, return_dict)
        noise = randn_tensor(model_output.shape, generator, sample.device, model_output.dtype) * s_noise
        noised = sample.float() + noise * sigma * ((gamma + 1) ** 2 - 1) ** 0.5
        row = euler_rows(self._options, self.sigmas, gamma + 1)[index].to(sample.device)
        return self._take(model_output, noised, None, return_dict, row)

"""DDPM: the ancestral sampler of Ho et al. 2020 (arXiv 2006.11239), as in diffusers' DDPMScheduler.

A step is (eq. 7)::

    x_{t-1} = sqrt(alpha_bar') beta / (1 - alpha_bar) x0 + sqrt(alpha) (1 - alpha_bar') / (1 - alpha_bar) x_t + sigma z

alpha_bar' belongs to the step's target timestep, alpha = alpha_bar / alpha_bar', and beta = 1 - alpha. sigma^2 is the
posterior's variance beta (1 - alpha_bar') / (1 - alpha_bar) for fixed_small, and beta for fixed_large. For
learned_range the model's output interpolates between the logarithms of the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.samplers.shared.marginals import Marginals, x0_columns
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import (
    ClippingConfig,
    DiffusionConfig,
    ThresholdingConfig,
    VarianceType,
    ZeroSNRConfig,
)
from fastdiff.samplers.shared.schedule import Schedule, stack_columns
from fastdiff.samplers.shared.scheduler import Scheduler, SchedulerOutput
from fastdiff.samplers.shared.timesteps import chosen_timesteps, following_in_list
from fastdiff.schema import checked, whole


@dataclass(frozen=True, kw_only=True)
class DDPMConfig(ClippingConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' DDPMScheduler."""

    variance_type: VarianceType = "fixed_small"

    BETA_SCHEDULES: ClassVar[tuple[str, ...]] = (*DiffusionConfig.BETA_SCHEDULES, "sigmoid", "laplace")

    @property
    def variance(self) -> str:
        return self.variance_type if self.variance_type.startswith("learned") else "fixed"


def ddpm_rows(config: DDPMConfig, alpha_bar: Tensor, timesteps: Tensor, following: Tensor) -> Tensor:
    """Return a row for each step from `timesteps` to `following`, (steps, len(COLUMNS)) float32.

    `alpha_bar` comes from `make_alpha_bar`. `timesteps` and `following` are (steps,) int64; a negative timestep stands
    for the clean picture. Raises InputError that names the option that leaves a step undefined.
    """
    if config.variance_type == "fixed_large_log":
        raise InputError("variance_type fixed_large_log takes the root of a negative number; use fixed_large")
    p = Marginals.between(alpha_bar, timesteps, following, 1.0)
    variance = p.variance.clamp(min=1e-20)  # so that its logarithm is finite
    std = {"fixed_small": variance.sqrt(), "fixed_small_log": variance.sqrt(), "fixed_large": p.beta.sqrt()}
    ranged = config.variance_type == "learned_range"
    columns = x0_columns(config.prediction_type, p) | {
        "prev_x0": p.alpha_bar_prev.sqrt() * p.beta / p.beta_bar,
        "prev_x": p.alpha.sqrt() * p.beta_bar_prev / p.beta_bar,
        "sigma": std.get(config.variance_type, torch.ones_like(variance)) * (timesteps > 0),
        "log_variance_min": variance.log() if ranged else torch.zeros_like(variance),
        "log_variance_max": p.beta.clamp(min=1e-20).log() if ranged else torch.zeros_like(variance),
    }
    return stack_columns(columns, config, timesteps, p.alpha_bar)


class DDPMScheduler(Scheduler):
    """The ancestral DDPM sampler (Ho et al. 2020), with the interface of diffusers' `DDPMScheduler`.

    `DDPMConfig` lists its options, which have diffusers' names and defaults.
    """

    names: ClassVar = {"ddpm": {}}
    place: ClassVar = 2
    config_class = DDPMConfig
    _options: DDPMConfig

    def _build(self, mapping: Mapping[str, Any]) -> None:
        super()._build(mapping)
        self._spaced = False  # whether set_timesteps was called

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Set the steps of a run: their number, or custom `timesteps` in descending order.

        Raises InputError unless exactly one of the two is given, and if it is outside the training timesteps.
        """
        device = None if device is None else resolve_device(device)
        self.timesteps = chosen_timesteps(self._options, num_inference_steps, timesteps).to(device)
        if num_inference_steps is not None:
            self.num_inference_steps = len(self.timesteps)
        self._spaced = True

    def _table_of_loop(self) -> Schedule:
        chain, rows = self._make_rows(int(self.timesteps[0]))
        return Schedule(chain, rows, self._step_options, tuple((chain > 0).tolist()))

    def previous_timestep(self, timestep: int | Tensor) -> int:
        """Return the target timestep of a step: the next one in `timesteps`, and -1 after the last.

        Before the first `set_timesteps` the target is timestep - 1.
        """
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
        """Take one step: return `x_{t-1}` and the predicted `x0`, both (N, C, ...).

        The arithmetic runs in float32, or in float64 for a float64 sample. The results have the wider dtype of
        `model_output` and `sample`. Before the first `set_timesteps` the step goes to timestep - 1.

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype. A learned variance adds C
                more channels.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            generator: Draws the noise: one generator for the batch, or a list with one for each picture.
            return_dict: Return a `SchedulerOutput` instead of a plain tuple.

        Raises InputError that names an invalid timestep, or a tensor of a wrong type, shape or dtype.
        """
        t = self._checked_step(timestep, sample, generator, return_dict, model_output=model_output)
        row = self._row(t, sample.device)
        noise = None if t == 0 else randn_tensor(sample.shape, generator, sample.device, model_output.dtype)
        return self._advance(model_output, sample, row, noise, return_dict)

    def _chain(self, timestep: int) -> tuple[Tensor, Tensor]:
        """Return the timesteps of the run that contains `timestep`, and the target of each step."""
        if not self._spaced:
            return torch.tensor([timestep]), torch.tensor([timestep - 1])
        chain = self.timesteps.cpu()
        if not (chain == timestep).any():
            raise InputError(f"timestep {timestep} is not one of the scheduler's timesteps; call set_timesteps for it")
        return chain, following_in_list(chain)

    def _make_rows(self, timestep: int, *options: float) -> tuple[Tensor, Tensor]:
        chain, following = self._chain(timestep)
        return chain, ddpm_rows(self._options, self.alphas_cumprod, chain, following)

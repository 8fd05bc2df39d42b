"""LCM: steps of a latent consistency model (Luo et al. 2023, arXiv 2310.04378), as in diffusers' LCMScheduler.

Each call predicts the picture f = c_skip x_t + c_out x0, with c_skip = s^2 / (u^2 + s^2) and
c_out = u / sqrt(u^2 + s^2) for the scaled timestep u. At timestep 0, f is x_t (eq. 9; Song et al. 2023, appendix C).
All steps but the last add fresh noise to f (algorithm 3)::

    x_next = sqrt(alpha_bar') f + sqrt(1 - alpha_bar') z
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from fastdiff.errors import InputError
from fastdiff.kinds import Fraction, NotNegative, TrainSteps
from fastdiff.outputs import read_by_name
from fastdiff.samplers.shared.counted import CountedScheduler
from fastdiff.samplers.shared.marginals import Marginals, x0_columns
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import ClippingConfig, ThresholdingConfig, ZeroSNRConfig
from fastdiff.samplers.shared.schedule import stack_columns
from fastdiff.samplers.shared.timesteps import checked_steps, custom_timesteps
from fastdiff.schema import checked, whole

SIGMA_DATA = 0.5  # s


@dataclass(frozen=True, kw_only=True)
class LCMConfig(ClippingConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' LCMScheduler. It ignores timestep_spacing and steps_offset."""

    beta_start: Fraction = 0.00085
    beta_end: Fraction = 0.012
    beta_schedule: str = "scaled_linear"
    original_inference_steps: TrainSteps = 50  # how many timesteps the model was distilled at
    clip_sample: bool = False
    set_alpha_to_one: bool = True  # alpha_bar of a timestep below zero; no step goes there
    timestep_scaling: NotNegative = 10.0  # in the boundary condition


def lcm_timesteps(config: LCMConfig, steps: int, original_steps: int | None = None, strength: float = 1.0) -> Tensor:
    """Return a run's timesteps, descending, chosen from those that the model was distilled at: (steps,) int64.

    Args:
        config: The scheduler's options.
        steps: The number of timesteps to choose.
        original_steps: How many timesteps the model was distilled at; None: the config's original_inference_steps.
        strength: The fraction of them to choose from, beginning with the least noisy.

    Raises InputError for more steps than there are to choose from, and for more original steps than training steps.
    """
    total = config.num_train_timesteps
    original = config.original_inference_steps if original_steps is None else original_steps
    if original > total:
        raise InputError(f"original_inference_steps is {original}; it must be at most the {total} training steps")
    distilled = np.arange(1, int(original * strength) + 1) * (total // original) - 1
    if steps > len(distilled):
        raise InputError(
            f"num_inference_steps is {steps}; {original} original_inference_steps at strength {strength:g} allow"
            f" {len(distilled)}; use fewer steps"
        )
    places = np.floor(np.linspace(0, len(distilled), num=steps, endpoint=False)).astype(np.int64)
    return torch.from_numpy(distilled[::-1][places].astype(np.int64))


def boundary_scalings(config: LCMConfig, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """Return c_skip and c_out at timesteps (steps,), both (steps,) float64."""
    scaled = timesteps.double() * config.timestep_scaling
    square = scaled**2 + SIGMA_DATA**2
    return SIGMA_DATA**2 / square, scaled / square.sqrt()


def lcm_rows(config: LCMConfig, alpha_bar: Tensor, timesteps: Tensor, last: int) -> Tensor:
    """Return a row for each step over timesteps (steps,) int64. Step `last` adds no noise.

    (steps, len(COLUMNS)) float32. Raises InputError that names the option that leaves a step undefined.
    """
    following = torch.cat([timesteps[1:], timesteps[-1:]])
    p = Marginals.between(alpha_bar, timesteps, following, 1.0)
    c_skip, c_out = boundary_scalings(config, timesteps)
    ends = torch.arange(len(timesteps)) == last
    signal = torch.where(ends, 1.0, p.alpha_bar_prev.sqrt())
    columns = x0_columns(config.prediction_type, p) | {
        "prev_x0": signal * c_out,
        "prev_x": signal * c_skip,
        "sigma": torch.where(ends, 0.0, p.beta_bar_prev.sqrt()),
    }
    return stack_columns(columns, config, timesteps, p.alpha_bar)


@read_by_name
class LCMSchedulerOutput(NamedTuple):
    """The result of a step, as in diffusers' class of this name. Both tensors are (N, C, ...)."""

    prev_sample: Tensor  # x_{t-1}
    denoised: Tensor  # the picture that the model predicts


class LCMScheduler(CountedScheduler):
    """The sampler of latent consistency models (Luo et al. 2023), with the interface of diffusers' `LCMScheduler`.

    `LCMConfig` lists its options, which have diffusers' names and defaults. The model must be distilled for
    LCM.
    """

    names: ClassVar = {"lcm": {}}
    place: ClassVar = 10
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
            chosen = lcm_timesteps(self._options, steps, original, strength)
        else:
            chosen = custom_timesteps(self._options, timesteps)
            steps = len(chosen)
            chosen = chosen[steps - int(steps * strength) :]
            if not len(chosen):
                raise InputError(f"strength {strength:g} leaves none of {steps} timesteps; increase either")
        self._begin_run(chosen, device)
        self.num_inference_steps = steps
        self._scalings = torch.stack(boundary_scalings(self._options, chosen), dim=1).tolist()

    @property
    def _last(self) -> int:
        """The step that adds no noise: the run's last. It is not taken if `strength` cut custom timesteps."""
        return (self.num_inference_steps or len(self.timesteps)) - 1

    def _make_table(self, begin: int) -> Tensor:
        return lcm_rows(self._options, self.alphas_cumprod, self.timesteps.cpu(), self._last)

    def _draws(self, index: int) -> bool:
        return index != self._last

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> LCMSchedulerOutput | tuple[Tensor, ...]:
        """Take one step: return `x_{t-1}` and the denoised picture, both (N, C, ...).

        Both have the wider dtype of `model_output` and `sample`.

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            generator: Draws the noise: one generator for the batch, or a list with one for each picture.
            return_dict: Return an `LCMSchedulerOutput` instead of a plain tuple.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        index = self._checked_index(timestep, sample, generator, return_dict, model_output)
        dtype = torch.promote_types(model_output.dtype, sample.dtype)
        noise = None
        if self._draws(index):
            noise = randn_tensor(model_output.shape, generator, sample.device, dtype)
        x_prev, x0 = self._take(model_output, sample, noise, return_dict=False)
        c_skip, c_out = self._scalings[index]
        result = LCMSchedulerOutput(x_prev, (c_out * x0 + c_skip * sample).to(dtype))
        return result if return_dict else tuple(result)

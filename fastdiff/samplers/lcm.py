"""LCM: steps of a latent consistency model (Luo et al. 2023, arXiv 2310.04378), as in diffusers' LCMScheduler.

Each call predicts the picture f = c_skip x_t + c_out x0, with c_skip = s^2 / (u^2 + s^2) and
c_out = u / sqrt(u^2 + s^2) for the scaled timestep u. At timestep 0, f is x_t (eq. 9; Song et al. 2023, appendix C).
All steps but the last add fresh noise to f (algorithm 3)::

    x_next = sqrt(alpha_bar') f + sqrt(1 - alpha_bar') z
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from fastdiff.kinds import NotNegative
from fastdiff.outputs import read_by_name
from fastdiff.samplers.shared.counted import DistilledScheduler
from fastdiff.samplers.shared.marginals import Marginals, x0_columns
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import ClippingConfig, DistilledConfig, ThresholdingConfig
from fastdiff.samplers.shared.schedule import stack_columns

SIGMA_DATA = 0.5  # s


@dataclass(frozen=True, kw_only=True)
class LCMConfig(DistilledConfig, ClippingConfig, ThresholdingConfig):
    """The options of diffusers' LCMScheduler."""

    clip_sample: bool = False
    set_alpha_to_one: bool = True  # alpha_bar of a timestep below zero; no step goes there
    timestep_scaling: NotNegative = 10.0  # in the boundary condition


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


class LCMScheduler(DistilledScheduler):
    """The sampler of latent consistency models (Luo et al. 2023), with the interface of diffusers' `LCMScheduler`.

    `LCMConfig` lists its options, which have diffusers' names and defaults. The model must be distilled for
    LCM.
    """

    names: ClassVar = {"lcm": {}}
    place: ClassVar = 10
    config_class = LCMConfig
    _options: LCMConfig

    def _begin_run(self, timesteps: Tensor, device: torch.device | str | None) -> None:
        super()._begin_run(timesteps, device)
        self._scalings = torch.stack(boundary_scalings(self._options, timesteps), dim=1).tolist()

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

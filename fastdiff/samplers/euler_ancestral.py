"""Euler's method with ancestral steps, as in diffusers' EulerAncestralDiscreteScheduler.

In the variables of Karras et al. 2022 (arXiv 2206.00364), x = x_0 + sigma * eps. A step follows the tangent
(x - x0) / sigma past the next sigma down to sigma_down, and adds noise of standard deviation sigma_up::

    sigma_up^2 = sigma_next^2 (sigma^2 - sigma_next^2) / sigma^2
    sigma_down^2 = sigma_next^2 - sigma_up^2
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Generator, Tensor

from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import SigmaConfig, ZeroSNRConfig
from fastdiff.samplers.shared.schedule import stack_sigma_columns
from fastdiff.samplers.shared.scheduler import SchedulerOutput
from fastdiff.samplers.shared.sigma_scheduler import ScaledScheduler
from fastdiff.samplers.shared.sigmas import sigma_x0_columns


@dataclass(frozen=True, kw_only=True)
class EulerAncestralConfig(SigmaConfig, ZeroSNRConfig):
    """The options of diffusers' EulerAncestralDiscreteScheduler."""

    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"


def ancestral_rows(config: EulerAncestralConfig, sigmas: Tensor) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32. (steps, len(COLUMNS)) float32."""
    sigma, following = sigmas[:-1].double(), sigmas[1:].double()
    up = (following**2 * (sigma**2 - following**2) / sigma**2).sqrt()
    down = (following**2 - up**2).sqrt()
    columns = sigma_x0_columns(config.prediction_type, sigma)
    columns |= {"prev_x": down / sigma, "prev_x0": 1 - down / sigma, "sigma": up}
    return stack_sigma_columns(columns, sigma)


class EulerAncestralDiscreteScheduler(ScaledScheduler):
    """Ancestral Euler steps, with the interface of diffusers' `EulerAncestralDiscreteScheduler`.

    `EulerAncestralConfig` lists its options, which have diffusers' names and defaults. prediction_type is "epsilon" or
    "v_prediction".
    """

    names: ClassVar = {"euler-a": {}}
    a1111_names: ClassVar = {"euler-a": "Euler a"}
    place: ClassVar = 4
    config_class = EulerAncestralConfig
    _options: EulerAncestralConfig

    def _make_table(self, begin: int) -> Tensor:
        return ancestral_rows(self._options, self.sigmas)

    def _draws(self, index: int) -> bool:
        return True

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Take one step: return `x_{t-1}` and the predicted `x0`, both (N, C, ...).

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            generator: Draws the noise: one generator for the batch, or a list with one for each picture.
            return_dict: Return a `SchedulerOutput` instead of a plain tuple.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        self._checked_index(timestep, sample, generator, return_dict, model_output)
        noise = randn_tensor(model_output.shape, generator, sample.device, model_output.dtype)
        return self._take(model_output, sample, noise, return_dict)

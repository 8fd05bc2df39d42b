"""LMS: a linear multistep method (Adams-Bashforth) over sigmas of any spacing, as in diffusers' LMSDiscreteScheduler.

In the variables of Karras et al. 2022 (arXiv 2206.00364), the tangent of a picture is d = (x - x0) / sigma. A step fits
a polynomial through the tangents of the last four steps, and adds its integral from this sigma to the next::

    x_next = x + sum of w_k d_k

w_k is the integral of the Lagrange polynomial of the k-th sigma before this one.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.samplers.shared.options import SpacedSigmaConfig
from fastdiff.samplers.shared.schedule import stack_sigma_columns
from fastdiff.samplers.shared.scheduler import SchedulerOutput
from fastdiff.samplers.shared.sigma_scheduler import ScaledScheduler
from fastdiff.samplers.shared.sigmas import sigma_x0_columns, tangent_columns
from fastdiff.schema import checked, whole

ORDER = 4
POINTS, SHARES = np.polynomial.legendre.leggauss(2)  # Gauss quadrature on [-1, 1]: two points are exact for a cubic


@dataclass(frozen=True, kw_only=True)
class LMSConfig(SpacedSigmaConfig):
    """The options of diffusers' LMSDiscreteScheduler."""


def lms_rows(config: LMSConfig, sigmas: Tensor, order: int = ORDER) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32, of at most `order`. (steps, len(COLUMNS)) float32.

    If a loop begins in the middle of the run, the missing earlier outputs are zero, because diffusers leaves them out.
    Raises InputError that names a step without a solution.
    """
    levels = sigmas.double().numpy()
    weights = torch.from_numpy(np.stack([_weights(levels, i, order) for i in range(len(levels) - 1)]))
    sigma = sigmas[:-1].double()
    tangent = tangent_columns(config.prediction_type, sigma)
    columns = sigma_x0_columns(config.prediction_type, sigma) | tangent
    columns |= {"prev_x": 1 + weights[:, 0] * tangent["keep_x"], "prev_m": weights[:, 0] * tangent["keep_m"]}
    columns |= {f"prev_h{k}": weights[:, k] for k in range(1, ORDER)}
    return stack_sigma_columns(columns, sigma)


def _weights(sigmas: np.ndarray, i: int, order: int) -> np.ndarray:
    """Return the weights of this tangent and of earlier ones, (ORDER,) float64; zero beyond the order."""
    known = sigmas[max(0, i + 1 - order) : i + 1][::-1]
    if len(set(known.tolist())) < len(known):
        raise InputError(f"step {i + 1} of {len(sigmas) - 1} repeats a timestep; use fewer steps")
    half = (sigmas[i + 1] - sigmas[i]) / 2
    points = sigmas[i] + half * (1 + POINTS)
    weights = np.zeros(ORDER)
    for k, own in enumerate(known):
        others = np.delete(known, k)
        weights[k] = half * SHARES @ ((points[:, None] - others) / (own - others)).prod(axis=1)
    return weights


class LMSDiscreteScheduler(ScaledScheduler):
    """A linear multistep method over sigmas, with the interface of diffusers' `LMSDiscreteScheduler`.

    `LMSConfig` lists its options, which have diffusers' names and defaults.
    """

    names: ClassVar = {
        "lms": {},
        "lms-karras": {"use_karras_sigmas": True, "use_exponential_sigmas": False, "use_beta_sigmas": False},
    }
    place: ClassVar = 7
    config_class = LMSConfig
    multistep = True
    rounds_to_output = False
    _options: LMSConfig

    def _make_table(self, begin: int) -> Tensor:
        return lms_rows(self._options, self.sigmas)

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        order: int = ORDER,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Take one step: return `x_{t-1}` and the predicted `x0`, both (N, C, ...).

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            order: How many model outputs the step reads at most, including its own: 1 to 4.
            return_dict: Return a `SchedulerOutput` instead of a plain tuple.

        Raises InputError that names an `order` out of range, a timestep outside the run, or a tensor of a wrong type,
        shape or dtype.
        """
        order = checked("order", order, whole(1, ORDER))
        index = self._checked_index(timestep, sample, None, return_dict, model_output)
        row = None
        if order < ORDER:
            row = self._completed(lms_rows(self._options, self.sigmas, order), begin=0)[index].to(sample.device)
        return self._take(model_output, sample, None, return_dict, row)

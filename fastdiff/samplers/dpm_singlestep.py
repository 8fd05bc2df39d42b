"""Singlestep DPM-Solver and DPM-Solver++ (Lu et al. 2022), as in diffusers' DPMSolverSinglestepScheduler.

The formulas match dpm_solver.py, but a step of order k makes k calls within its own span, and reads no output
of earlier steps. Call j is a step of order j from the beginning of the span to the next timestep::

    order 3:  x_1 = first order from x, x_2 = second order from x, x_3 = third order from x
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Interval
from torch import Generator, Tensor

from fastdiff.errors import InputError
from fastdiff.samplers.dpm_solver import (
    OF_OTHERS,
    DPMSolverScheduler,
    LambdaMin,
    SolverType,
    check_algorithm,
    dpm_terms,
    lambda_clipped,
    learns_variance,
)
from fastdiff.samplers.shared.flow import noise_ratios, solver_rows, solver_sigmas
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import FinalSigma, FlowConfig, VarianceType
from fastdiff.samplers.shared.scheduler import SchedulerOutput
from fastdiff.samplers.shared.sigmas import solver_timesteps, with_final


@dataclass(frozen=True, kw_only=True)
class DPMSinglestepConfig(FlowConfig):
    """The options of diffusers' DPMSolverSinglestepScheduler."""

    solver_order: Annotated[int, Interval(ge=1, le=3)] = 2
    algorithm_type: Annotated[Literal["dpmsolver", "dpmsolver++", "sde-dpmsolver++"], OF_OTHERS] = "dpmsolver++"
    solver_type: SolverType = "midpoint"
    lower_order_final: bool = False  # always, if solver_order does not divide the steps or the last sigma is zero
    final_sigmas_type: FinalSigma = "zero"  # "dpmsolver" needs "sigma_min"
    lambda_min_clipped: LambdaMin = -math.inf
    variance_type: VarianceType | None = None  # the channels of a learned variance are ignored

    LACKS: ClassVar[frozenset[str]] = frozenset({"timestep_spacing", "steps_offset"})

    def check(self) -> None:
        super().check()
        check_algorithm(self.algorithm_type, self.prediction_type, self.final_sigmas_type)


def singlestep_sigmas(
    config: DPMSinglestepConfig, alpha_bar: Tensor, steps: int, shift: float
) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) int64 and sigmas (steps + 1,) float32 of a run. `shift` is of a flow."""
    total = config.num_train_timesteps - lambda_clipped(alpha_bar, config.lambda_min_clipped)
    return singlestep_sigmas_at(config, alpha_bar, solver_timesteps(config, steps, total), shift)


def singlestep_sigmas_at(
    config: DPMSinglestepConfig, alpha_bar: Tensor, own: np.ndarray, shift: float
) -> tuple[Tensor, Tensor]:
    """Return the same as `singlestep_sigmas`, for timesteps of the caller, (steps,) int64."""
    timesteps, sigmas = solver_sigmas(config, alpha_bar, own, shift, ("karras",))
    return timesteps, with_final(sigmas, alpha_bar, config.final_sigmas_type)


def singlestep_orders(config: DPMSinglestepConfig, steps: int) -> list[int]:
    """Return the order of each call: 1 at the beginning of a span, then 2 and 3 (Lu et al. 2022, algorithm 2)."""
    order, zero = config.solver_order, config.final_sigmas_type == "zero"
    orders = [1 + i % order for i in range(steps)]
    lowers = config.lower_order_final or steps % order != 0 or zero
    if lowers and steps % order == 0 and order > 1:
        orders[-2:] = {2: [1, 1], 3: [2, 1]}[order]
    if zero:
        orders[-1] = 1
    return orders


def singlestep_rows(config: DPMSinglestepConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each call over sigmas (steps + 1,) float32, for a loop that begins with call `begin`.

    (steps, len(COLUMNS)) float32. Raises InputError that names a call without a solution.
    """
    ratios = noise_ratios(config, sigmas)
    orders = singlestep_orders(config, len(ratios) - 1)
    # a loop that begins within a span knows fewer outputs
    calls = [_call(config, ratios, i, min(order, max(1, i - begin + 1))) for i, order in enumerate(orders)]
    return solver_rows(config, sigmas, calls, keeps_eps=not config.algorithm_type.endswith("++"))


def _call(config: DPMSinglestepConfig, ratios: list[float], i: int, order: int) -> dict[str, float]:
    """Return the coefficients of x_next by column, for noise / signal at each call."""
    start, end = ratios[i + 1 - order], ratios[i + 1]
    sample = {"y_x": 1.0} if order == 1 else {"y_s": 1.0}  # x at the beginning of the span
    if start == end:
        return sample | {"prev_y": 1.0}
    terms = dpm_terms(config, config.algorithm_type, start, end)
    sample |= {"prev_y": terms.sample, "sigma": terms.sigma}
    if order == 1:
        return sample | {"output": terms.output}
    h = math.log(start / end)
    places = [math.log(start / ratio) / h for ratio in ratios[i + 2 - order : i + 1]]  # within the span
    if 0 in places or len({*places}) < len(places):
        raise InputError(f"step {i + 1} of {len(ratios) - 1} repeats a timestep; use fewer steps")
    midpoint = config.solver_type == "midpoint"
    if order == 2:
        own = (terms.half if midpoint else terms.slope) / places[0]
        return sample | {"output": own, "prev_h1": terms.output - own}
    r1, r0 = places
    # D1 and D2 from the slopes D10 = (h1 - h2) / r1 and D11 = (output - h2) / r0; "midpoint" takes D1 = D11, D2 = 0
    d10 = 0.0 if midpoint else (terms.slope * r0 - 2 * terms.curve) / (r0 - r1)
    d11 = terms.slope - d10
    return sample | {"output": d11 / r0, "prev_h1": d10 / r1, "prev_h2": terms.output - d10 / r1 - d11 / r0}


class DPMSolverSinglestepScheduler(DPMSolverScheduler):
    """Singlestep DPM-Solver and DPM-Solver++, with the interface of diffusers' `DPMSolverSinglestepScheduler`.

    The methods are by Lu et al. 2022. `DPMSinglestepConfig` lists the options. They have diffusers' names and defaults.
    A run of n steps calls the model n times: a step of order k counts as k.
    """

    names: ClassVar = {
        "dpm++2s": {"algorithm_type": "dpmsolver++"},
        "dpm++2s-karras": {
            "algorithm_type": "dpmsolver++",
            "use_karras_sigmas": True,
            "use_exponential_sigmas": False,
            "use_beta_sigmas": False,
        },
        "dpm++2s-sde": {"algorithm_type": "sde-dpmsolver++"},
        "dpm++2s-sde-karras": {
            "algorithm_type": "sde-dpmsolver++",
            "use_karras_sigmas": True,
            "use_exponential_sigmas": False,
            "use_beta_sigmas": False,
        },
        "dpmsolver-2s": {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
    }
    a1111_names: ClassVar = {"dpm++2s": "DPM++ 2S", "dpm++2s-sde": "DPM++ 2S SDE"}
    place: ClassVar = 5.5
    config_class = DPMSinglestepConfig
    rounds_to_output = False
    _options: DPMSinglestepConfig

    def _spaced_sigmas(self, steps: int, shift: float) -> tuple[Tensor, Tensor]:
        return singlestep_sigmas(self._options, self.alphas_cumprod, steps, shift)

    def _sigmas_at(self, timesteps: np.ndarray, shift: float) -> tuple[Tensor, Tensor]:
        return singlestep_sigmas_at(self._options, self.alphas_cumprod, timesteps, shift)

    def _make_table(self, begin: int) -> Tensor:
        return singlestep_rows(self._options, self.sigmas, begin)

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Take one call's part of a step: return `x_{t-1}` (N, C, ...).

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype. The channels of a learned
                variance are ignored.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            generator: Draws the noise of "sde-dpmsolver++": one generator for the batch, or a list with one for each
                picture.
            return_dict: Return a `SchedulerOutput`, which also holds the predicted `x0`. If False, return a tuple of
                `x_{t-1}` alone.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        index = self._checked_index(timestep, sample, generator, return_dict, model_output)
        if learns_variance(self._options.variance_type):
            model_output = model_output[:, : sample.shape[1]]
        noise = None
        if self._draws(index):
            noise = randn_tensor(sample.shape, generator, sample.device, model_output.dtype)
        return self._take(model_output, sample, noise, return_dict)

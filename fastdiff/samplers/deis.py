"""DEIS: an exponential integrator of several steps (Zhang and Chen 2022, arXiv 2204.13902), as in diffusers' scheduler.

With the shares alpha of the signal and sigma of the noise, rho = sigma / alpha, and the model's eps, x / alpha moves by
the integral of eps over rho. A step fits a polynomial in log(rho) through this output and earlier ones::

    x_next / alpha_next = x / alpha + sum of w_k eps_k

w_k is the integral of the Lagrange polynomial of the k-th output before this one (the paper's "log rho" variant).
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from numpy.polynomial import Polynomial
from pydantic import BeforeValidator
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.samplers.shared.counted import NoiselessScheduler
from fastdiff.samplers.shared.flow import noise_ratios, run_shift, signal_and_noise, solver_rows, solver_sigmas
from fastdiff.samplers.shared.options import FlowConfig
from fastdiff.samplers.shared.sigma_scheduler import VariancePreservingScheduler
from fastdiff.samplers.shared.sigmas import solver_timesteps, training_sigmas
from fastdiff.samplers.shared.timesteps import checked_steps

FEW_STEPS = 15  # lower_order_final lowers the order of runs with fewer steps

# values of DPM-Solver and UniPC, and what this scheduler uses instead
_INSTEAD = {"dpmsolver": "deis", "dpmsolver++": "deis"} | dict.fromkeys(("midpoint", "heun", "bh1", "bh2"), "logrho")
_OF_OTHERS = BeforeValidator(lambda value: _INSTEAD.get(value, value) if isinstance(value, str) else value)


@dataclass(frozen=True, kw_only=True)
class DEISConfig(FlowConfig):
    """The options of diffusers' DEISMultistepScheduler."""

    solver_order: Annotated[int, Interval(ge=1, le=3)] = 2
    algorithm_type: Annotated[Literal["deis"], _OF_OTHERS] = "deis"
    solver_type: Annotated[Literal["logrho"], _OF_OTHERS] = "logrho"
    lower_order_final: bool = True  # in runs of fewer than 15 steps


def deis_sigmas(config: DEISConfig, alpha_bar: Tensor, steps: int, shift: float) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) int64 and sigmas (steps + 1,) float32 of a run. `shift` is of a flow.

    The run ends at the smallest training sigma, or repeats its last sigma if the sigmas are spaced.
    """
    own = solver_timesteps(config, steps, config.num_train_timesteps)
    timesteps, sigmas = solver_sigmas(config, alpha_bar, own, shift, ("karras",))
    final = training_sigmas(alpha_bar)[0].item() if config.sigma_spacing is None else sigmas[-1]
    return timesteps, torch.from_numpy(np.append(sigmas, final).astype(np.float32))


def deis_rows(config: DEISConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32, for a loop that begins with step `begin`.

    (steps, len(COLUMNS)) float32. Raises InputError that names a step without a solution.
    """
    ratios = noise_ratios(config, sigmas)
    steps = [_step(config, ratios, i, _order(config, i, begin, len(ratios) - 1)) for i in range(len(ratios) - 1)]
    return solver_rows(config, sigmas, steps, keeps_eps=True)


def _order(config: DEISConfig, i: int, begin: int, steps: int) -> int:
    known = max(1, i - begin + 1)
    left = steps - i if config.lower_order_final and steps < FEW_STEPS else config.solver_order
    return min(config.solver_order, known, left)


def _step(config: DEISConfig, ratios: list[float], i: int, order: int) -> dict[str, float]:
    """Return the coefficients of x_next by column, for rho at each step."""
    (alpha, _), (alpha_now, _) = signal_and_noise(config, ratios[i + 1]), signal_and_noise(config, ratios[i])
    known = [math.log(ratio) for ratio in ratios[i + 1 - order : i + 1]][::-1]
    if len({*known}) < order:
        raise InputError(f"step {i + 1} of {len(ratios) - 1} repeats a timestep; use fewer steps")
    weights = [alpha * _integral(known, k, ratios[i], ratios[i + 1]) for k in range(order)]
    return {"prev_x": alpha / alpha_now} | dict(zip(("output", "prev_h1", "prev_h2"), weights, strict=False))


def _integral(known: list[float], k: int, start: float, end: float) -> float:
    """Return the integral from `start` to `end` over rho of the Lagrange polynomial in log(rho) of a known output."""
    lagrange = Polynomial([1.0])
    for other in known[:k] + known[k + 1 :]:
        lagrange *= Polynomial([-other, 1.0]) / (known[k] - other)
    # with u = log(rho), the antiderivative of p(u) exp(u) is (p - p' + p'') exp(u), which is zero at rho 0
    inner = lagrange - lagrange.deriv() + lagrange.deriv(2)
    return (end * inner(math.log(end)) if end > 0 else 0.0) - start * inner(math.log(start))


class DEISMultistepScheduler(VariancePreservingScheduler, NoiselessScheduler):
    """DEIS over several steps (Zhang and Chen 2022), with the interface of diffusers' `DEISMultistepScheduler`.

    `DEISConfig` lists its options, which have diffusers' names and defaults.
    """

    names: ClassVar = {
        "deis": {"algorithm_type": "deis"},
        "deis-karras": {
            "algorithm_type": "deis",
            "use_karras_sigmas": True,
            "use_exponential_sigmas": False,
            "use_beta_sigmas": False,
        },
    }
    place: ClassVar = 9.5
    config_class = DEISConfig
    multistep = True
    returns_x0 = False
    rounds_to_output = False
    _options: DEISConfig

    def set_timesteps(
        self, num_inference_steps: int, device: torch.device | str | None = None, mu: float | None = None
    ) -> None:
        """Set the number of steps of a run, and make `timesteps` on `device`.

        `mu` shifts the sigmas of a flow by exp(mu) instead of flow_shift. Raises InputError unless the number is from 1
        to the number of training timesteps, if `steps_offset` moves a timestep outside them, and for `mu` without
        use_dynamic_shifting.
        """
        steps, shift = checked_steps(self._options, num_inference_steps), run_shift(self._options, mu)
        self._choose(*deis_sigmas(self._options, self.alphas_cumprod, steps, shift), device)

    def _make_table(self, begin: int) -> Tensor:
        return deis_rows(self._options, self.sigmas, begin)

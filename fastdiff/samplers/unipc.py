"""UniPC: a multistep predictor and corrector (Zhao et al. 2023, arXiv 2302.04867), as in diffusers' scheduler.

This is UniC and UniP with B(h), as in UniPCMultistepScheduler. The model runs on the predicted sample. The next step
first uses that output to correct the sample (UniC), and then predicts from the corrected sample (UniP). With
lambda = -log(sigma) and h = lambda_t - lambda_s, both are::

    x_t = sigma_t / sigma_s x_s - alpha_t (exp(-h) - 1) x0_s - alpha_t B(h) sum of rho_k (x0_k - x0_s) / r_k

The output x0_k is at lambda_s + r_k h. The corrector's last output is at t itself.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from pydantic import BeforeValidator
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.kinds import PositiveNumber
from fastdiff.samplers.shared.counted import NoiselessScheduler
from fastdiff.samplers.shared.options import FinalSigma, SpacedSigmaConfig, ThresholdingConfig, ZeroSNRConfig
from fastdiff.samplers.shared.schedule import stack_sigma_columns
from fastdiff.samplers.shared.sigma_scheduler import VariancePreservingScheduler
from fastdiff.samplers.shared.sigmas import (
    sigmas_at,
    solver_timesteps,
    spaced_sigmas,
    timesteps_of,
    training_sigmas,
    variance_preserving,
    vp_x0_columns,
    with_final,
)
from fastdiff.samplers.shared.timesteps import checked_steps

EARLIER_OUTPUTS = ("h1", "h2", "h3")

# solver_type values of DPM-Solver, and what this scheduler uses instead
_OF_DPM_SOLVER = BeforeValidator(lambda value: "bh2" if value in ("midpoint", "heun", "logrho") else value)


@dataclass(frozen=True, kw_only=True)
class UniPCConfig(SpacedSigmaConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' UniPCMultistepScheduler, without flows, predict_x0 False and solver_p."""

    solver_order: Annotated[int, Interval(ge=1, le=3)] = 2
    predict_x0: Literal[True] = True
    solver_type: Annotated[Literal["bh1", "bh2"], _OF_DPM_SOLVER] = "bh2"
    lower_order_final: bool = True
    disable_corrector: tuple[Annotated[int, Interval(ge=0)], ...] = ()  # steps whose result is not corrected
    solver_p: Literal[None] = None
    use_flow_sigmas: Literal[False] | None = False
    flow_shift: float = 1.0  # only read with use_flow_sigmas
    use_dynamic_shifting: Literal[False] = False
    time_shift_type: Literal["exponential"] = "exponential"  # only read with use_dynamic_shifting
    final_sigmas_type: FinalSigma = "zero"
    sigma_min: PositiveNumber | None = None  # only read by the karras, exponential and beta spacings
    sigma_max: PositiveNumber | None = None
    shift_terminal: Literal[None] = None

    def check(self) -> None:
        super().check()
        if self.final_sigmas_type == "zero" and self.solver_order > 1 and not self.lower_order_final:
            raise InputError("lower_order_final False cannot step to sigma zero; use final_sigmas_type sigma_min")


def unipc_sigmas(config: UniPCConfig, alpha_bar: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) int64 and sigmas (steps + 1,) float32 of a run."""
    timesteps = solver_timesteps(config, steps, config.num_train_timesteps)
    trained = training_sigmas(alpha_bar).numpy()
    spacing = config.sigma_spacing
    if spacing is None:
        sigmas = with_final(sigmas_at(timesteps, trained), alpha_bar, config.final_sigmas_type)
        return torch.from_numpy(timesteps), sigmas
    levels = spaced_sigmas(spacing, np.flip(trained), steps, config.sigma_min, config.sigma_max)
    times = timesteps_of(levels, np.log(trained))
    times = times.round() if spacing == "karras" else times
    final = levels[-1] if config.final_sigmas_type == "sigma_min" else 0.0
    return torch.from_numpy(times.astype(np.int64)), torch.from_numpy(np.append(levels, final).astype(np.float32))


def unipc_rows(config: UniPCConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32, for a loop that begins with step `begin`.

    (steps, len(COLUMNS)) float32. Raises InputError that names a step without a solution.
    """
    levels = sigmas.double().tolist()
    rows = [_step(config, levels, i, begin) for i in range(len(levels) - 1)]
    names = {name for row in rows for name in row}
    columns = {name: torch.tensor([row.get(name, 0.0) for row in rows], dtype=torch.float64) for name in names}
    sigma = sigmas[:-1].double()
    columns |= vp_x0_columns(config.prediction_type, sigma) | {"keep_x0": torch.ones_like(sigma)}
    return stack_sigma_columns(columns, sigma)


def _order(config: UniPCConfig, i: int, begin: int, steps: int) -> int:
    known = max(1, i - begin + 1)
    return min(config.solver_order, known, steps - i if config.lower_order_final else known)


def _step(config: UniPCConfig, sigmas: list[float], i: int, begin: int) -> dict[str, float]:
    """Return the coefficients of y, the corrected sample, and of x_next, by column."""
    steps = len(sigmas) - 1
    columns = {"y_x": 1.0}
    if i > begin and i - 1 not in config.disable_corrector:
        order = _order(config, i - 1, begin, steps)
        sample, weights = _advance(config, sigmas, i - 1, order, corrects=True)
        # the last weight belongs to this step's own output, the others to earlier outputs
        columns = {"y_s": sample, "y_x0": weights[-1]}
        columns |= {f"y_{name}": weight for name, weight in zip(EARLIER_OUTPUTS, weights[:-1], strict=False)}
    sample, weights = _advance(config, sigmas, i, _order(config, i, begin, steps), corrects=False)
    columns |= {"prev_y": sample, "prev_x0": weights[0]}
    return columns | {f"prev_{name}": weight for name, weight in zip(EARLIER_OUTPUTS, weights[1:], strict=False)}


def _advance(
    config: UniPCConfig, sigmas: list[float], i: int, order: int, *, corrects: bool
) -> tuple[float, list[float]]:
    """Return the coefficients of x_s, and of the outputs at s and before. A corrector's last output is the one at t."""
    (alpha, noise), (_, noise_now) = variance_preserving(sigmas[i + 1]), variance_preserving(sigmas[i])
    hh = -math.inf if sigmas[i + 1] == 0 else math.log(sigmas[i + 1] / sigmas[i])
    phi = math.expm1(hh)
    b_h = hh if config.solver_type == "bh1" else phi
    # if h is zero (the smallest sigma twice, or equal timesteps), the differences have no weight
    ratios = [math.log(sigmas[i] / sigmas[i - k]) / -hh for k in range(1, order)] if hh != 0 else []
    if any(ratio == 0 for ratio in ratios):
        raise InputError(f"step {i + 1} of {len(sigmas) - 1} repeats a timestep; use fewer steps")
    weights = [-alpha * phi] + [0.0] * (order - 1 + corrects)
    for k, (ratio, rho) in enumerate(zip([*ratios, 1.0], _shares(ratios, hh, b_h, corrects), strict=False), start=1):
        weights[k] -= alpha * b_h * rho / ratio
        weights[0] += alpha * b_h * rho / ratio
    return noise / noise_now, weights


def _shares(ratios: list[float], hh: float, b_h: float, corrects: bool) -> list[float]:
    """Return rho of each difference (eq. 11). For a single difference it is one half."""
    count = len(ratios) + corrects
    if count <= 1:
        return [0.5] * count
    nodes = np.array([*ratios, 1.0])[:count]
    powers, factorial, phi, right = [], 1, math.expm1(hh) / hh - 1, []
    for k in range(1, count + 1):
        powers.append(nodes ** (k - 1))
        right.append(phi * factorial / b_h)
        factorial *= k + 1
        phi = phi / hh - 1 / factorial
    return np.linalg.solve(np.array(powers), np.array(right)).tolist()


class UniPCMultistepScheduler(VariancePreservingScheduler, NoiselessScheduler):
    """The UniPC predictor-corrector (Zhao et al. 2023), with the interface of diffusers' `UniPCMultistepScheduler`.

    `UniPCConfig` lists its options, which have diffusers' names and defaults. Flow matching, `predict_x0=False` and
    `solver_p` are not supported.
    """

    names: ClassVar = {
        "unipc": {},
        "unipc-karras": {"use_karras_sigmas": True, "use_exponential_sigmas": False, "use_beta_sigmas": False},
    }
    a1111_names: ClassVar = {"unipc": "UniPC"}
    place: ClassVar = 9
    config_class = UniPCConfig
    multistep = True
    returns_x0 = False
    _options: UniPCConfig

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Set the number of steps of a run, and make `timesteps` on `device`.

        Raises InputError unless the number is from 1 to the number of training timesteps, and if `steps_offset` moves a
        timestep outside them.
        """
        steps = checked_steps(self._options, num_inference_steps)
        self._choose(*unipc_sigmas(self._options, self.alphas_cumprod, steps), device)

    def _make_table(self, begin: int) -> Tensor:
        return unipc_rows(self._options, self.sigmas, begin)

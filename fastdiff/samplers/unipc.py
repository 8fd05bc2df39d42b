"""UniPC: a multistep predictor and corrector (Zhao et al. 2023, arXiv 2302.04867), as in diffusers' scheduler.

This is UniC and UniP with B(h), as in UniPCMultistepScheduler. The model runs on the predicted sample. The next step
first uses that output to correct the sample (UniC), and then predicts from the corrected sample (UniP). With
lambda = -log(sigma) and h = lambda_t - lambda_s, both are::

    x_t = sigma_t / sigma_s x_s - alpha_t (exp(-h) - 1) x0_s - alpha_t B(h) sum of rho_k (x0_k - x0_s) / r_k

The output x0_k is at lambda_s + r_k h. The corrector's last output is at t itself. With predict_x0 False, the outputs
are eps, alpha and sigma change places, and exp(h) replaces exp(-h). In a flow, alpha is 1 - sigma.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from pydantic import BeforeValidator
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.kernels.denoise import StepOptions
from fastdiff.kinds import PositiveNumber
from fastdiff.samplers.shared.counted import NoiselessScheduler
from fastdiff.samplers.shared.flow import Mu, noise_ratios, shifted, signal_and_noise
from fastdiff.samplers.shared.options import FinalSigma, FlowConfig, ThresholdingConfig, ZeroSNRConfig
from fastdiff.samplers.shared.schedule import stack_sigma_columns
from fastdiff.samplers.shared.sigma_scheduler import VariancePreservingScheduler, check_chosen
from fastdiff.samplers.shared.sigmas import (
    Array,
    eps_columns,
    sigmas_at,
    solver_timesteps,
    spaced_sigmas,
    stretched,
    time_shifted,
    timesteps_of,
    training_sigmas,
    vp_x0_columns,
    with_final,
)
from fastdiff.samplers.shared.timesteps import checked_steps, custom_numbers
from fastdiff.schema import Wanted, checked

EARLIER_OUTPUTS = ("h1", "h2", "h3")
LEAST_SIGNAL = 1e-6  # at the first step of a flow, whose logarithm must be finite

# solver_type values of DPM-Solver, and what this scheduler uses instead
_OF_DPM_SOLVER = BeforeValidator(lambda value: "bh2" if value in ("midpoint", "heun", "logrho") else value)


@dataclass(frozen=True, kw_only=True)
class UniPCConfig(FlowConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' UniPCMultistepScheduler, without solver_p."""

    solver_order: Annotated[int, Interval(ge=1, le=3)] = 2
    predict_x0: bool = True  # whether the solver reads x0 or eps
    solver_type: Annotated[Literal["bh1", "bh2"], _OF_DPM_SOLVER] = "bh2"
    lower_order_final: bool = True
    disable_corrector: tuple[Annotated[int, Interval(ge=0)], ...] = ()  # steps whose result is not corrected
    solver_p: Annotated[Literal[None], Wanted("supported; leave it out")] = None  # another scheduler, in diffusers
    final_sigmas_type: FinalSigma = "zero"
    sigma_min: PositiveNumber | None = None  # only read by the karras, exponential and beta spacings
    sigma_max: PositiveNumber | None = None
    shift_terminal: float | None = None  # the sigmas of a flow are stretched to end here

    SPACINGS_OF_FLOWS: ClassVar[tuple[str, ...]] = ("karras",)

    def check(self) -> None:
        super().check()
        if self.shift_terminal is not None and not self.use_flow_sigmas:
            raise InputError("shift_terminal is only read with use_flow_sigmas; leave it out, or set use_flow_sigmas")
        if not self.predict_x0 and self.prediction_type == "flow_prediction":
            raise InputError("predict_x0 False has no prediction_type flow_prediction; set predict_x0 to True")
        if self.final_sigmas_type == "zero" and not self.predict_x0:
            raise InputError("predict_x0 False cannot step to sigma zero; use final_sigmas_type sigma_min")
        if self.final_sigmas_type == "zero" and self.solver_order > 1 and not self.lower_order_final:
            raise InputError("lower_order_final False cannot step to sigma zero; use final_sigmas_type sigma_min")


def unipc_sigmas(
    config: UniPCConfig, alpha_bar: Tensor, steps: int, mu: float | None = None, flow: Array | None = None
) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) int64 and sigmas (steps + 1,) float32 of a run.

    Args:
        config: The scheduler's options.
        alpha_bar: From `sigma_alpha_bar`.
        steps: Their number.
        mu: The amount of the shift of a flow with use_dynamic_shifting.
        flow: Custom sigmas of a flow before its shift, (steps,) float64.
    """
    timesteps, spacing = solver_timesteps(config, steps, config.num_train_timesteps), config.sigma_spacing
    trained = training_sigmas(alpha_bar).numpy()
    if spacing is None:
        sigmas = with_final(sigmas_at(timesteps, trained), alpha_bar, config.final_sigmas_type)
        return torch.from_numpy(timesteps), sigmas
    if spacing == "flow":
        levels = _flow_sigmas(config, np.linspace(1, 1 / config.num_train_timesteps, steps + 1)[:-1], mu, flow)
    else:
        levels = spaced_sigmas(spacing, np.flip(trained), steps, config.sigma_min, config.sigma_max)
    if config.use_flow_sigmas:
        levels = levels if spacing == "flow" else levels / (levels + 1)
        times = levels * config.num_train_timesteps
    else:
        times = timesteps_of(levels, np.log(trained))
        times = times.round() if spacing == "karras" else times
    final = levels[-1] if config.final_sigmas_type == "sigma_min" else 0.0
    return torch.from_numpy(times.astype(np.int64)), torch.from_numpy(np.append(levels, final).astype(np.float32))


def _flow_sigmas(config: UniPCConfig, even: Array, mu: float | None, custom: Array | None) -> Array:
    """Return the sigmas of a flow, shifted and stretched, (steps,) float64. `even` are those without custom ones."""
    sigmas = even if custom is None else custom
    if config.use_dynamic_shifting:
        sigmas = time_shifted(sigmas, math.exp(checked("mu", mu, Mu)))
    else:
        sigmas = shifted(sigmas, config.flow_shift)
    if config.shift_terminal:
        sigmas = stretched(sigmas, config.shift_terminal)
    if abs(sigmas[0] - 1) < LEAST_SIGNAL:
        sigmas[0] -= LEAST_SIGNAL
    return sigmas


def unipc_rows(config: UniPCConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32, for a loop that begins with step `begin`.

    (steps, len(COLUMNS)) float32. Raises InputError that names a step without a solution.
    """
    ratios = noise_ratios(config, sigmas)
    rows = [_step(config, ratios, i, begin) for i in range(len(ratios) - 1)]
    names = {name for row in rows for name in row}
    columns = {name: torch.tensor([row.get(name, 0.0) for row in rows], dtype=torch.float64) for name in names}
    sigma = sigmas[:-1].double()
    x0 = vp_x0_columns(config.prediction_type, sigma, config.use_flow_sigmas)
    own, corrects = columns.pop("output"), columns.pop("corrects")
    if config.predict_x0:
        columns |= {"prev_x0": own, "y_x0": corrects, "keep_x0": torch.ones_like(sigma)}
    else:
        shares = torch.tensor([signal_and_noise(config, ratio) for ratio in ratios[:-1]], dtype=torch.float64)
        signal, noise = shares.unbind(dim=1)
        kept = eps_columns(x0, signal, noise, thresholds=False)
        # y has no column for the model's output. It leaves eps out, x_next adds it, and the next step finds it in h1
        own = own + columns["prev_y"] * corrects
        zero = torch.zeros_like(sigma)
        late = columns.get("y_s", zero) * corrects.roll(1)
        columns |= kept | {"prev_x": own * kept["keep_x"], "prev_m": own * kept["keep_m"]}
        columns["y_h1"] = columns.get("y_h1", zero) + late
    return stack_sigma_columns(columns | x0, sigma)


def _order(config: UniPCConfig, i: int, begin: int, steps: int) -> int:
    known = max(1, i - begin + 1)
    return min(config.solver_order, known, steps - i if config.lower_order_final else known)


def _step(config: UniPCConfig, ratios: list[float], i: int, begin: int) -> dict[str, float]:
    """Return the coefficients of y, the corrected sample, and of x_next, by column.

    "corrects" is the coefficient of the step's own output in y, and "output" its coefficient in x_next.
    """
    steps = len(ratios) - 1
    columns = {"y_x": 1.0, "corrects": 0.0}
    if i > begin and i - 1 not in config.disable_corrector:
        order = _order(config, i - 1, begin, steps)
        sample, weights = _advance(config, ratios, i - 1, order, corrects=True)
        # the last weight belongs to this step's own output, the others to earlier outputs
        columns = {"y_x": 0.0, "y_s": sample, "corrects": weights[-1]}
        columns |= {f"y_{name}": weight for name, weight in zip(EARLIER_OUTPUTS, weights[:-1], strict=False)}
    sample, weights = _advance(config, ratios, i, _order(config, i, begin, steps), corrects=False)
    columns |= {"prev_y": sample, "output": weights[0]}
    return columns | {f"prev_{name}": weight for name, weight in zip(EARLIER_OUTPUTS, weights[1:], strict=False)}


def _advance(
    config: UniPCConfig, levels: list[float], i: int, order: int, *, corrects: bool
) -> tuple[float, list[float]]:
    """Return the coefficients of x_s, and of the outputs at s and before. A corrector's last output is the one at t.

    `levels` are the ratios of noise to signal.
    """
    at_t, at_s = signal_and_noise(config, levels[i + 1]), signal_and_noise(config, levels[i])
    down = -math.inf if levels[i + 1] == 0 else math.log(levels[i + 1] / levels[i])  # -h
    # x_s keeps its noise, or for outputs of eps its signal
    of_output, of_sample, hh = (
        (at_t[0], at_t[1] / at_s[1], down) if config.predict_x0 else (at_t[1], at_t[0] / at_s[0], -down)
    )
    phi = math.expm1(hh)
    b_h = hh if config.solver_type == "bh1" else phi
    # if h is zero (the smallest sigma twice, or equal timesteps), the differences have no weight
    ratios = [math.log(levels[i] / levels[i - k]) / -down for k in range(1, order)] if down != 0 else []
    if any(ratio == 0 for ratio in ratios):
        raise InputError(f"step {i + 1} of {len(levels) - 1} repeats a timestep; use fewer steps")
    weights = [-of_output * phi] + [0.0] * (order - 1 + corrects)
    for k, (ratio, rho) in enumerate(zip([*ratios, 1.0], _shares(ratios, hh, b_h, corrects), strict=False), start=1):
        weights[k] -= of_output * b_h * rho / ratio
        weights[0] += of_output * b_h * rho / ratio
    return of_sample, weights


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

    `UniPCConfig` lists its options, which have diffusers' names and defaults. `solver_p`, which is another scheduler in
    diffusers, is not supported.
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

    def _build(self, mapping: Mapping[str, Any]) -> None:
        super()._build(mapping)
        if not self._options.predict_x0:
            self._step_options = StepOptions()  # as in diffusers, which then ignores thresholding

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
    ) -> None:
        """Set the steps of a run: their number, or custom `sigmas` of a flow.

        Args:
            num_inference_steps: The number of steps.
            device: The device of `timesteps`.
            sigmas: Custom sigmas from at most 1 down to above 0, without the one after the last step. The shift moves
                them. They need use_flow_sigmas.
            mu: The amount of the shift with use_dynamic_shifting; otherwise not read.

        Raises InputError unless exactly one of `num_inference_steps` and `sigmas` is given, for numbers out of range,
        and if `steps_offset` moves a timestep outside the training timesteps.
        """
        check_chosen(self._options, num_inference_steps=num_inference_steps, sigmas=sigmas)
        if self._options.use_dynamic_shifting and mu is None:
            raise InputError("mu is None; give the shift that use_dynamic_shifting needs")
        custom = None
        if sigmas is not None:
            if self._options.sigma_spacing != "flow":
                raise InputError("sigmas: custom ones need use_flow_sigmas alone; give num_inference_steps")
            custom = custom_numbers("sigmas", sigmas, 1)
        steps = checked_steps(self._options, num_inference_steps if custom is None else len(custom))
        self._choose(*unipc_sigmas(self._options, self.alphas_cumprod, steps, mu, custom), device)

    def _make_table(self, begin: int) -> Tensor:
        return unipc_rows(self._options, self.sigmas, begin)

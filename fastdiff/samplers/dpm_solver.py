"""Multistep DPM-Solver++ (Lu et al. 2022, arXiv 2211.01095), as in diffusers' DPMSolverMultistepScheduler.

With alpha = 1 / sqrt(sigma^2 + 1), lambda = -log(sigma) and h = lambda_next - lambda, a first-order step is DDIM's::

    x_next = (sigma_next alpha_next) / (sigma alpha) x + alpha_next (1 - exp(-h)) x0

The second order adds the first difference of x0 over earlier steps, and the third order also the second difference
(appendix B). The stochastic variant replaces exp(-h) by exp(-2h) in the weights of the outputs, multiplies the
coefficient of x by exp(-h), and adds noise of standard deviation sigma_next alpha_next sqrt(1 - exp(-2h)).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from pydantic import AllowInfNan, BeforeValidator
from torch import Generator, Tensor

from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, beside, tensor
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import (
    FinalSigma,
    SpacedSigmaConfig,
    ThresholdingConfig,
    VarianceType,
    ZeroSNRConfig,
)
from fastdiff.samplers.shared.schedule import stack_sigma_columns
from fastdiff.samplers.shared.scheduler import SchedulerOutput
from fastdiff.samplers.shared.sigma_scheduler import VariancePreservingScheduler, check_chosen
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
from fastdiff.samplers.shared.timesteps import checked_steps, custom_timesteps

FEW_STEPS = 15  # lower_order_final lowers the order of runs with fewer steps

# solver_type values of other schedulers, and what this scheduler uses instead
_INSTEAD = {"logrho": "midpoint", "bh1": "midpoint", "bh2": "midpoint"}
_OF_OTHERS = BeforeValidator(lambda value: _INSTEAD.get(value, value) if isinstance(value, str) else value)


@dataclass(frozen=True, kw_only=True)
class DPMSolverConfig(SpacedSigmaConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' DPMSolverMultistepScheduler; without flows and the deprecated solvers."""

    solver_order: Annotated[int, Interval(ge=1, le=3)] = 2
    algorithm_type: Literal["dpmsolver++", "sde-dpmsolver++"] = "dpmsolver++"
    solver_type: Annotated[Literal["midpoint", "heun"], _OF_OTHERS] = "midpoint"
    lower_order_final: bool = True  # in runs of fewer than 15 steps
    euler_at_final: bool = False
    use_lu_lambdas: bool | None = False
    use_flow_sigmas: Literal[False] | None = False
    flow_shift: float = 1.0  # only read with use_flow_sigmas
    final_sigmas_type: FinalSigma = "zero"
    lambda_min_clipped: Annotated[float, AllowInfNan()] = -math.inf
    variance_type: VarianceType | None = None  # the channels of a learned variance are ignored
    use_dynamic_shifting: Literal[False] = False
    time_shift_type: Literal["exponential"] = "exponential"  # only read with use_dynamic_shifting

    @property
    def learns_variance(self) -> bool:
        """Whether the model's output has channels for a learned variance."""
        return (self.variance_type or "").startswith("learned")

    @property
    def stochastic(self) -> bool:
        """Whether steps add noise."""
        return self.algorithm_type == "sde-dpmsolver++"

    @property
    def sigma_spacing(self) -> str | None:
        spacing = super().sigma_spacing
        return "lu" if self.use_lu_lambdas and spacing != "karras" else spacing


def dpm_sigmas(config: DPMSolverConfig, alpha_bar: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) int64 and sigmas (steps + 1,) float32 of a run."""
    log_snr = torch.log(torch.sqrt(alpha_bar)) - torch.log(torch.sqrt(1 - alpha_bar))
    clipped = int(torch.searchsorted(log_snr.flip(0), config.lambda_min_clipped))
    return _finish(config, alpha_bar, solver_timesteps(config, steps, config.num_train_timesteps - clipped), steps)


def dpm_sigmas_at(config: DPMSolverConfig, alpha_bar: Tensor, timesteps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the same as `dpm_sigmas`, for custom timesteps."""
    return _finish(config, alpha_bar, np.array(timesteps).astype(np.int64), len(timesteps))


def _finish(config: DPMSolverConfig, alpha_bar: Tensor, timesteps: np.ndarray, steps: int) -> tuple[Tensor, Tensor]:
    trained = training_sigmas(alpha_bar).numpy()
    spacing = config.sigma_spacing
    if spacing is None:
        sigmas = sigmas_at(timesteps, trained)
    else:
        sigmas = spaced_sigmas(spacing, np.flip(trained), steps)
        timesteps = timesteps_of(sigmas, np.log(trained))
        if spacing in ("karras", "lu") and config.beta_schedule != "squaredcos_cap_v2":
            timesteps = timesteps.round()
    return torch.from_numpy(timesteps.astype(np.int64)), with_final(sigmas, alpha_bar, config.final_sigmas_type)


def dpm_rows(config: DPMSolverConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32, for a loop that begins with step `begin`.

    (steps, len(COLUMNS)) float32. Raises InputError that names a step without a solution.
    """
    levels = sigmas.double().tolist()
    steps = [_step(config, levels, i, _order(config, i, begin, len(levels) - 1)) for i in range(len(levels) - 1)]
    columns = {name: torch.tensor([step.get(name, 0.0) for step in steps], dtype=torch.float64) for name in _COLUMNS}
    sigma = sigmas[:-1].double()
    columns |= vp_x0_columns(config.prediction_type, sigma) | {"keep_x0": torch.ones_like(sigma)}
    return stack_sigma_columns(columns, sigma)


_COLUMNS = ("prev_x", "prev_x0", "prev_h1", "prev_h2", "sigma")


def _order(config: DPMSolverConfig, i: int, begin: int, steps: int) -> int:
    """Return the order of a step: at most the number of known outputs, and less at the end of a short run."""
    few = config.lower_order_final and steps < FEW_STEPS
    known = max(1, i - begin + 1)
    if i == steps - 1 and (config.euler_at_final or few or config.final_sigmas_type == "zero"):
        return 1
    return min(config.solver_order, known, 2 if i == steps - 2 and few else 3)


def _step(config: DPMSolverConfig, sigmas: list[float], i: int, order: int) -> dict[str, float]:
    """Return the coefficients of x_next by column."""
    (alpha, noise), (_, noise_now) = variance_preserving(sigmas[i + 1]), variance_preserving(sigmas[i])
    h = math.inf if sigmas[i + 1] == 0 else math.log(sigmas[i] / sigmas[i + 1])
    if h == 0:  # the smallest sigma twice, or equal timesteps
        return {"prev_x": 1.0}
    twice = 2 if config.stochastic else 1
    shrunk = -math.expm1(-twice * h)  # 1 - exp(-h), or 1 - exp(-2h)
    prev_x = noise / noise_now * (math.exp(-h) if config.stochastic else 1.0)
    first = alpha * shrunk  # the weight of x0; the weights of its differences follow
    ratios = [math.log(sigmas[i - k - 1] / sigmas[i - k]) / h for k in range(order - 1)]
    if any(ratio == 0 for ratio in ratios):
        raise InputError(f"step {i + 1} of {len(sigmas) - 1} repeats a timestep; use fewer steps")
    weights = [first]
    if order == 2:
        weights.append(first / 2 if config.solver_type == "midpoint" else alpha * (1 - shrunk / (twice * h)))
    if order == 3:
        weights.append(alpha * (1 - shrunk / (twice * h)))
        half = -0.5 if config.stochastic else 0.5  # diffusers' sign
        weights.append(alpha * ((shrunk - twice * h) / (twice * h) ** 2 + half))
    return {"prev_x": prev_x, "sigma": noise * math.sqrt(shrunk) if config.stochastic else 0.0} | _by_output(
        weights, ratios
    )


def _by_output(weights: list[float], ratios: list[float]) -> dict[str, float]:
    """Return the coefficient of each x0, given the weights of x0 and of its differences D1 and D2 (appendix B).

    `ratios` are the lengths in lambda of the steps before this one, the latest first, relative to h.
    """
    if len(weights) == 1:
        return {"prev_x0": weights[0]}
    if len(weights) == 2:
        slope = weights[1] / ratios[0]
        return {"prev_x0": weights[0] + slope, "prev_h1": -slope}
    r0, r1 = ratios
    # with slopes D10 and D11: D1 = D10 + r0 / (r0 + r1) (D10 - D11) and D2 = (D10 - D11) / (r0 + r1)
    curve = (weights[1] * r0 + weights[2]) / (r0 + r1)
    latest, earlier = (weights[1] + curve) / r0, -curve / r1
    return {"prev_x0": weights[0] + latest, "prev_h1": earlier - latest, "prev_h2": -earlier}


class DPMSolverMultistepScheduler(VariancePreservingScheduler):
    """Multistep DPM-Solver++ (Lu et al. 2022), with the interface of diffusers' `DPMSolverMultistepScheduler`.

    `DPMSolverConfig` lists its options, which have diffusers' names and defaults. `algorithm_type` is "dpmsolver++" or
    "sde-dpmsolver++"; the deprecated algorithms and flow matching are not supported.
    """

    names: ClassVar = {
        "dpm++2m": {"algorithm_type": "dpmsolver++"},
        "dpm++2m-karras": {
            "algorithm_type": "dpmsolver++",
            "use_karras_sigmas": True,
            "use_exponential_sigmas": False,
            "use_beta_sigmas": False,
        },
        "dpm++2m-sde": {"algorithm_type": "sde-dpmsolver++"},
        "dpm++2m-sde-karras": {
            "algorithm_type": "sde-dpmsolver++",
            "use_karras_sigmas": True,
            "use_exponential_sigmas": False,
            "use_beta_sigmas": False,
        },
    }
    a1111_names: ClassVar = {"dpm++2m": "DPM++ 2M", "dpm++2m-sde": "DPM++ 2M SDE"}
    place: ClassVar = 5
    config_class = DPMSolverConfig
    multistep = True
    returns_x0 = False
    noise_dtype = torch.float32
    _options: DPMSolverConfig

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        mu: float | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Set the steps of a run: their number, or custom `timesteps` in descending order.

        Raises InputError unless exactly one of the two is given, for custom timesteps if the config spaces the sigmas
        in another way (such as use_karras_sigmas), and for `mu`, which belongs to flow matching.
        """
        if mu is not None:
            raise InputError("mu belongs to use_dynamic_shifting, which is not supported; leave it out")
        check_chosen(self._options, num_inference_steps=num_inference_steps, timesteps=timesteps)
        if timesteps is None:
            steps = checked_steps(self._options, num_inference_steps)
            chosen = dpm_sigmas(self._options, self.alphas_cumprod, steps)
        else:
            own = custom_timesteps(self._options, timesteps).tolist()
            chosen = dpm_sigmas_at(self._options, self.alphas_cumprod, own)
        self._choose(*chosen, device)

    def _make_table(self, begin: int) -> Tensor:
        return dpm_rows(self._options, self.sigmas, begin)

    def _draws(self, index: int) -> bool:
        return self._options.stochastic

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: Generator | list[Generator] | None = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        """Take one step: return `x_{t-1}` (N, C, ...) in the model output's dtype.

        Args:
            model_output: The model's output for `sample`, (N, C, ...) of any float dtype. The channels of a learned
                variance are ignored.
            timestep: The timestep that the model saw.
            sample: `x_t`, (N, C, ...) of any float dtype.
            generator: Draws the noise of "sde-dpmsolver++": one generator for the batch, or a list with one for each
                picture.
            variance_noise: Noise (N, C, ...) to use instead of drawing it.
            return_dict: Return a `SchedulerOutput`, which also holds the predicted `x0`. If False, return a tuple of
                `x_{t-1}` alone.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        self._checked_index(timestep, sample, generator, return_dict, model_output)
        if self._options.learns_variance:
            model_output = model_output[:, : sample.shape[1]]
        noise = None
        if self._options.stochastic and variance_noise is not None:
            noise = beside("variance_noise", tensor("variance_noise", variance_noise, FLOATS), sample.device).float()
        elif self._options.stochastic:
            noise = randn_tensor(sample.shape, generator, sample.device, self.noise_dtype)
        return self._take(model_output, sample, noise, return_dict)

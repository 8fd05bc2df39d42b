"""Multistep DPM-Solver and DPM-Solver++, as in diffusers' DPMSolverMultistepScheduler.

Both are by Lu et al. 2022 (arXiv 2206.00927 and 2211.01095). With the shares alpha of the signal and sigma of the
noise, lambda = log(alpha / sigma) and h = lambda_next - lambda, a first-order step of either is DDIM's::

    dpmsolver++  x_next = (sigma_next / sigma) x + alpha_next (1 - exp(-h)) x0
    dpmsolver    x_next = (alpha_next / alpha) x - sigma_next (exp(h) - 1) eps

The second order adds the first difference of x0 or eps over earlier steps, and the third order also the second
difference (appendix B of the second paper).

The stochastic variants add noise. That of DPM-Solver++ replaces exp(-h) by exp(-2h) in the weights of the outputs,
multiplies the coefficient of x by exp(-h), and adds noise of standard deviation sigma_next sqrt(1 - exp(-2h)). That of
DPM-Solver doubles the weights of the outputs, and adds noise of standard deviation sigma_next sqrt(exp(2h) - 1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Interval
from pydantic import AllowInfNan, BeforeValidator
from torch import Generator, Tensor

from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, beside, tensor
from fastdiff.samplers.shared.flow import noise_ratios, run_shift, signal_and_noise, solver_rows, solver_sigmas
from fastdiff.samplers.shared.noise import randn_tensor
from fastdiff.samplers.shared.options import FinalSigma, FlowConfig, VarianceType, ZeroSNRConfig
from fastdiff.samplers.shared.scheduler import SchedulerOutput
from fastdiff.samplers.shared.sigma_scheduler import VariancePreservingScheduler, check_chosen
from fastdiff.samplers.shared.sigmas import solver_timesteps, with_final
from fastdiff.samplers.shared.timesteps import checked_steps, custom_timesteps

FEW_STEPS = 15  # lower_order_final lowers the order of runs with fewer steps

# values of other schedulers, and what these schedulers use instead
_INSTEAD = {"logrho": "midpoint", "bh1": "midpoint", "bh2": "midpoint", "deis": "dpmsolver++"}
OF_OTHERS = BeforeValidator(lambda value: _INSTEAD.get(value, value) if isinstance(value, str) else value)

SolverType = Annotated[Literal["midpoint", "heun"], OF_OTHERS]
LambdaMin = Annotated[float, AllowInfNan()]


@dataclass(frozen=True, kw_only=True)
class DPMSolverConfig(FlowConfig, ZeroSNRConfig):
    """The options of diffusers' DPMSolverMultistepScheduler."""

    solver_order: Annotated[int, Interval(ge=1, le=3)] = 2
    algorithm_type: Annotated[Literal["dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++"], OF_OTHERS] = (
        "dpmsolver++"
    )
    solver_type: SolverType = "midpoint"
    lower_order_final: bool = True  # in runs of fewer than 15 steps
    euler_at_final: bool = False
    use_lu_lambdas: bool | None = False
    final_sigmas_type: FinalSigma = "zero"  # "dpmsolver" and "sde-dpmsolver" need "sigma_min"
    lambda_min_clipped: LambdaMin = -math.inf
    variance_type: VarianceType | None = None  # the channels of a learned variance are ignored

    def check(self) -> None:
        super().check()
        check_algorithm(self.algorithm_type, self.prediction_type, self.final_sigmas_type)
        if self.algorithm_type == "sde-dpmsolver" and self.solver_order == 3:
            raise InputError("algorithm_type sde-dpmsolver has no solver_order 3; use 1 or 2, or sde-dpmsolver++")

    @property
    def sigma_spacing(self) -> str | None:
        spacing = super().sigma_spacing
        return "lu" if self.use_lu_lambdas and spacing != "karras" else spacing


def check_algorithm(algorithm: str, prediction_type: str, final_sigmas_type: str) -> None:
    """Raise InputError for options that only the algorithms on x0 (with ++) have."""
    if algorithm.endswith("++"):
        return
    if final_sigmas_type == "zero":
        raise InputError(f"algorithm_type {algorithm} cannot step to sigma zero; use final_sigmas_type sigma_min")
    if prediction_type == "flow_prediction":
        raise InputError(f"algorithm_type {algorithm} has no prediction_type flow_prediction; use {algorithm}++")


def learns_variance(variance_type: str | None) -> bool:
    """Return whether the model's output has channels for a learned variance."""
    return (variance_type or "").startswith("learned")


def lambda_clipped(alpha_bar: Tensor, lambda_min: float) -> int:
    """Return the number of training timesteps, at the noisy end, whose log(alpha / sigma) is below `lambda_min`."""
    if lambda_min == -math.inf:  # the default
        return 0
    log_snr = torch.log(torch.sqrt(alpha_bar)) - torch.log(torch.sqrt(1 - alpha_bar))
    return int(torch.searchsorted(log_snr.flip(0), lambda_min))


def dpm_sigmas(config: DPMSolverConfig, alpha_bar: Tensor, steps: int, shift: float) -> tuple[Tensor, Tensor]:
    """Return the timesteps (steps,) int64 and sigmas (steps + 1,) float32 of a run. `shift` is of a flow."""
    total = config.num_train_timesteps - lambda_clipped(alpha_bar, config.lambda_min_clipped)
    return dpm_sigmas_at(config, alpha_bar, solver_timesteps(config, steps, total), shift)


def dpm_sigmas_at(config: DPMSolverConfig, alpha_bar: Tensor, own: np.ndarray, shift: float) -> tuple[Tensor, Tensor]:
    """Return the same as `dpm_sigmas`, for timesteps of the caller, (steps,) int64."""
    rounded = () if config.beta_schedule == "squaredcos_cap_v2" else ("karras", "lu")
    timesteps, sigmas = solver_sigmas(config, alpha_bar, own, shift, rounded)
    return timesteps, with_final(sigmas, alpha_bar, config.final_sigmas_type)


def dpm_rows(config: DPMSolverConfig, sigmas: Tensor, begin: int = 0) -> Tensor:
    """Return a row for each step over sigmas (steps + 1,) float32, for a loop that begins with step `begin`.

    (steps, len(COLUMNS)) float32. Raises InputError that names a step without a solution.
    """
    ratios = noise_ratios(config, sigmas)
    steps = [_step(config, ratios, i, _order(config, i, begin, len(ratios) - 1)) for i in range(len(ratios) - 1)]
    return solver_rows(config, sigmas, steps, keeps_eps=not config.algorithm_type.endswith("++"))


def _order(config: DPMSolverConfig, i: int, begin: int, steps: int) -> int:
    """Return the order of a step: at most the number of known outputs, and less at the end of a short run."""
    few = config.lower_order_final and steps < FEW_STEPS
    known = max(1, i - begin + 1)
    if i == steps - 1 and (config.euler_at_final or few or config.final_sigmas_type == "zero"):
        return 1
    return min(config.solver_order, known, 2 if i == steps - 2 and few else 3)


class Terms(NamedTuple):
    """The coefficients of a step: of x, of an output, and of the output's differences."""

    sample: float
    output: float
    half: float  # of the first difference in the second order's "midpoint"
    slope: float  # of the first difference otherwise
    curve: float  # of the second difference
    sigma: float  # the standard deviation of the noise


def dpm_terms(config: FlowConfig, algorithm: str, start: float, end: float) -> Terms:
    """Return the coefficients of a step between two noise / signal ratios (appendix B of both papers)."""
    (alpha, noise), (alpha_now, noise_now) = signal_and_noise(config, end), signal_and_noise(config, start)
    h = math.inf if end == 0 else math.log(start / end)
    sde = algorithm.startswith("sde")
    if algorithm.endswith("++"):
        twice = 2 * h if sde else h
        shrunk = -math.expm1(-twice)  # 1 - exp(-h), or 1 - exp(-2h)
        output = alpha * shrunk
        curve = alpha * ((shrunk - twice) / twice**2 + (-0.5 if sde else 0.5))  # diffusers' sign
        sample, sigma = noise / noise_now * (math.exp(-h) if sde else 1.0), noise * _root(shrunk)
        return Terms(sample, output, output / 2, alpha * (1 - shrunk / twice), curve, sigma if sde else 0.0)
    grown, share = math.expm1(h), -2 * noise if sde else -noise
    output, curve = share * grown, share * ((grown - h) / h**2 - 0.5)
    sigma = noise * _root(math.expm1(2 * h)) if sde else 0.0
    return Terms(alpha / alpha_now, output, output / 2, share * (grown / h - 1), curve, sigma)


def _root(variance: float) -> float:
    return math.sqrt(variance) if variance >= 0 else math.nan  # a step back to more noise; the row is refused


def _step(config: DPMSolverConfig, ratios: list[float], i: int, order: int) -> dict[str, float]:
    """Return the coefficients of x_next by column, for noise / signal at each step."""
    if ratios[i] == ratios[i + 1]:  # the smallest sigma twice, or equal timesteps
        return {"prev_x": 1.0}
    terms = dpm_terms(config, config.algorithm_type, ratios[i], ratios[i + 1])
    columns = {"prev_x": terms.sample, "sigma": terms.sigma, "output": terms.output}
    if order == 1:
        return columns
    h = math.log(ratios[i] / ratios[i + 1])
    lengths = [math.log(ratios[i - k - 1] / ratios[i - k]) / h for k in range(order - 1)]
    if 0 in lengths:
        raise InputError(f"step {i + 1} of {len(ratios) - 1} repeats a timestep; use fewer steps")
    halves = order == 2 and config.solver_type == "midpoint"
    return columns | _by_output(terms, terms.half if halves else terms.slope, lengths)


def _by_output(terms: Terms, slope: float, lengths: list[float]) -> dict[str, float]:
    """Return the coefficient of each output, given those of the output and of its differences D1 and D2 (appendix B).

    `lengths` are the lengths in lambda of the steps before this one, the latest first, relative to h.
    """
    if len(lengths) == 1:
        own = slope / lengths[0]
        return {"output": terms.output + own, "prev_h1": -own}
    r0, r1 = lengths
    # with slopes D10 and D11: D1 = D10 + r0 / (r0 + r1) (D10 - D11) and D2 = (D10 - D11) / (r0 + r1)
    curve = (slope * r0 + terms.curve) / (r0 + r1)
    latest, earlier = (slope + curve) / r0, -curve / r1
    return {"output": terms.output + latest, "prev_h1": earlier - latest, "prev_h2": -earlier}


class DPMSolverScheduler(VariancePreservingScheduler):
    """The base of multistep and singlestep DPM-Solver: it chooses the calls of a run, and whether they draw noise."""

    multistep = True
    returns_x0 = False

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        mu: float | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Set the calls of a run: their number, or custom `timesteps` in descending order.

        `mu` shifts the sigmas of a flow by exp(mu) instead of flow_shift. Raises InputError unless exactly one of
        number and timesteps is given, for custom timesteps if the config spaces the sigmas in another way (such as
        use_karras_sigmas), and for `mu` without use_dynamic_shifting.
        """
        shift = run_shift(self._options, mu)
        check_chosen(self._options, num_inference_steps=num_inference_steps, timesteps=timesteps)
        if timesteps is None:
            steps = checked_steps(self._options, num_inference_steps)
            chosen = self._spaced_sigmas(steps, shift)
        else:
            own = custom_timesteps(self._options, timesteps).numpy()
            chosen = self._sigmas_at(own, shift)
        self._choose(*chosen, device)

    def _spaced_sigmas(self, steps: int, shift: float) -> tuple[Tensor, Tensor]:
        """Return the timesteps (steps,) int64 and sigmas (steps + 1,) float32 of a run of this many calls."""
        raise NotImplementedError

    def _sigmas_at(self, timesteps: np.ndarray, shift: float) -> tuple[Tensor, Tensor]:
        """Return the same for custom timesteps (steps,) int64."""
        raise NotImplementedError

    def _draws(self, index: int) -> bool:
        return self.config["algorithm_type"].startswith("sde")


class DPMSolverMultistepScheduler(DPMSolverScheduler):
    """Multistep DPM-Solver and DPM-Solver++, with the interface of diffusers' `DPMSolverMultistepScheduler`.

    The methods are by Lu et al. 2022. `DPMSolverConfig` lists the options, which have diffusers' names and defaults.
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
        "dpmsolver-2m": {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
        "dpmsolver-2m-sde": {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"},
    }
    a1111_names: ClassVar = {"dpm++2m": "DPM++ 2M", "dpm++2m-sde": "DPM++ 2M SDE"}
    place: ClassVar = 5
    config_class = DPMSolverConfig
    noise_dtype = torch.float32
    _options: DPMSolverConfig

    def _spaced_sigmas(self, steps: int, shift: float) -> tuple[Tensor, Tensor]:
        return dpm_sigmas(self._options, self.alphas_cumprod, steps, shift)

    def _sigmas_at(self, timesteps: np.ndarray, shift: float) -> tuple[Tensor, Tensor]:
        return dpm_sigmas_at(self._options, self.alphas_cumprod, timesteps, shift)

    def _make_table(self, begin: int) -> Tensor:
        return dpm_rows(self._options, self.sigmas, begin)

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
            generator: Draws the noise of the "sde" algorithms: one generator for the batch, or a list with one for each
                picture.
            variance_noise: Noise (N, C, ...) to use instead of drawing it.
            return_dict: Return a `SchedulerOutput`, which also holds the predicted `x0`. If False, return a tuple of
                `x_{t-1}` alone.

        Raises InputError that names a timestep outside the run, or a tensor of a wrong type, shape or dtype.
        """
        self._checked_index(timestep, sample, generator, return_dict, model_output)
        if learns_variance(self._options.variance_type):
            model_output = model_output[:, : sample.shape[1]]
        noise = None
        if self._options.algorithm_type.startswith("sde") and variance_noise is not None:
            noise = beside("variance_noise", tensor("variance_noise", variance_noise, FLOATS), sample.device).float()
        elif self._options.algorithm_type.startswith("sde"):
            noise = randn_tensor(sample.shape, generator, sample.device, self.noise_dtype)
        return self._take(model_output, sample, noise, return_dict)

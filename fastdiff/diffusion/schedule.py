"""Scheduler config -> coefficient table. A sampler is a function that makes rows; one step function serves them all.

The rows are those of `fastdiff.kernels.denoise.COLUMNS`, one a step, computed in float64 and stored in float32.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fastdiff.checkpoints.json_files import from_mapping
from fastdiff.errors import InputError
from fastdiff.kernels.denoise import COLUMNS, StepOptions

# Options of diffusers' other schedulers, of its two that we have, and of its early releases: a scheduler file may carry
# them and diffusers ignores them. Any further key is an error, since it could change the picture.
FOREIGN_OPTIONS = frozenset(
    """
    algorithm_type corrector_order disable_corrector euler_at_final final_sigmas_type flow_shift interpolation_type
    lambda_min_clipped lower_order_final noise_sampler_seed original_inference_steps predict_epsilon predict_x0
    predictor_order rho set_alpha_to_one shift_terminal sigma_data sigma_max sigma_min sigma_schedule skip_prk_steps
    solver_order solver_p solver_type tau_func tensor_format time_shift_type timestep_scaling timestep_type
    timestep_values use_beta_sigmas use_dynamic_shifting use_exponential_sigmas use_flow_sigmas use_karras_sigmas
    use_lu_lambdas variance_type
    """.split()  # noqa: SIM905 (a list would be a page)
)


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """What diffusers' DDPMScheduler and DDIMScheduler have in common, by the same names and with the same defaults."""

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None  # replaces the four above, but for num_train_timesteps
    clip_sample: bool = True
    prediction_type: str = "epsilon"  # epsilon, sample, v_prediction
    thresholding: bool = False  # instead of clip_sample
    dynamic_thresholding_ratio: float = 0.995
    clip_sample_range: float = 1.0
    sample_max_value: float = 1.0  # of thresholding
    timestep_spacing: str = "leading"  # leading, trailing, linspace
    steps_offset: int = 0  # of leading
    rescale_betas_zero_snr: bool = False

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "prediction_type": ("epsilon", "sample", "v_prediction"),
        "timestep_spacing": ("leading", "trailing", "linspace"),
    }

    def __post_init__(self):
        """Raises InputError naming an option of a wrong type or value."""
        for field in fields(self):
            _check_option(field.name, getattr(self, field.name), field.default)
        if self.num_train_timesteps < 1:
            raise InputError(f"num_train_timesteps is {self.num_train_timesteps}; it is 1 or more")
        if self.trained_betas is not None:
            object.__setattr__(self, "trained_betas", _numbers("trained_betas", self.trained_betas))
            if len(self.trained_betas) < self.num_train_timesteps:
                raise InputError(
                    f"trained_betas has {len(self.trained_betas)} values for {self.num_train_timesteps} training steps;"
                    " give one for each, or lower num_train_timesteps"
                )
        for name, choices in self.CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "beta_schedule" and self.trained_betas is not None):
                raise InputError(f"{name} {value!r} is not one of {type(self).__name__}'s: use {', '.join(choices)}")
        for name in ("beta_start", "beta_end", "dynamic_thresholding_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it is from 0 to 1")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "scheduler config"):
        """From a scheduler_config.json or the `.config` of a scheduler, ours or diffusers', of either kind.

        Raises InputError naming an option that no scheduler of diffusers has, or a wrong value.
        """
        own = {field.name for field in fields(cls)}
        # diffusers marks the values that nobody set: another scheduler takes its own default instead
        defaults = set(mapping.get("_use_default_values", ()))
        skipped = (FOREIGN_OPTIONS - own) | defaults
        return from_mapping(cls, {key: value for key, value in mapping.items() if key not in skipped}, source)


@dataclass(frozen=True, kw_only=True)
class DDPMConfig(DiffusionConfig):
    """The options of diffusers' DDPMScheduler."""

    variance_type: str = "fixed_small"

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = DiffusionConfig.CHOICES | {
        "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace"),
        "variance_type": (
            "fixed_small",
            "fixed_small_log",
            "fixed_large",
            "fixed_large_log",
            "learned",
            "learned_range",
        ),
    }


@dataclass(frozen=True, kw_only=True)
class DDIMConfig(DiffusionConfig):
    """The options of diffusers' DDIMScheduler."""

    set_alpha_to_one: bool = True  # the alpha_bar after the last step is 1, else that of timestep 0

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = DiffusionConfig.CHOICES | {
        "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    }


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of a run, made once."""

    timesteps: Tensor  # (steps,) int64, on the CPU: what the model is told
    rows: Tensor  # (steps, len(COLUMNS)) float32
    options: StepOptions
    draws_noise: tuple[bool, ...]  # per step, whether noise is added to it

    def __len__(self) -> int:
        return len(self.timesteps)

    def to(self, device: torch.device | str) -> "Schedule":
        """The same with its rows on `device`."""
        return Schedule(self.timesteps, self.rows.to(device), self.options, self.draws_noise)


def ddpm_schedule(
    config: DDPMConfig, num_inference_steps: int | None = None, *, timesteps: Sequence[int] | None = None
) -> Schedule:
    """The ancestral sampler of Ho et al. 2020 over `num_inference_steps`, or over custom `timesteps`.

    Each step goes to the next timestep of the list. Raises InputError naming the option that cannot be used.
    """
    if (num_inference_steps is None) == (timesteps is None):
        raise InputError("give either num_inference_steps or timesteps")
    chain = spaced_timesteps(config, num_inference_steps) if timesteps is None else custom_timesteps(config, timesteps)
    rows = ddpm_rows(config, make_alpha_bar(make_betas(config)), chain, ddpm_following(chain))
    return Schedule(chain, rows, step_options(config), tuple((chain > 0).tolist()))


def ddim_schedule(
    config: DDIMConfig, num_inference_steps: int, *, eta: float = 0.0, use_clipped_model_output: bool = False
) -> Schedule:
    """The sampler of Song et al. 2021: eta 0 is deterministic, eta 1 has DDPM's variance.

    Raises InputError naming the option that cannot be used.
    """
    chain = spaced_timesteps(config, num_inference_steps)
    following = ddim_following(config, chain, num_inference_steps)
    alpha_bar = make_alpha_bar(make_betas(config))
    rows = ddim_rows(config, alpha_bar, chain, following, eta, use_clipped_model_output)
    return Schedule(chain, rows, step_options(config), (eta > 0,) * len(chain))


def step_options(config: DiffusionConfig) -> StepOptions:
    """What the step function is told of `config`, besides the rows."""
    learned = getattr(config, "variance_type", "fixed")
    return StepOptions(
        clip_range=config.clip_sample_range if config.clip_sample and not config.thresholding else None,
        threshold_ratio=config.dynamic_thresholding_ratio if config.thresholding else None,
        threshold_max=config.sample_max_value,
        variance=learned if learned.startswith("learned") else "fixed",
    )


def make_betas(config: DiffusionConfig) -> Tensor:
    """beta_t of the forward process, (num_train_timesteps,) float32 with diffusers' bits."""
    steps, start, end = config.num_train_timesteps, config.beta_start, config.beta_end
    if config.trained_betas is not None:
        betas = torch.tensor(config.trained_betas, dtype=torch.float32)
    elif config.beta_schedule == "linear":
        betas = torch.linspace(start, end, steps, dtype=torch.float32)
    elif config.beta_schedule == "scaled_linear":
        betas = torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float32) ** 2
    elif config.beta_schedule == "sigmoid":
        betas = torch.linspace(-6, 6, steps, dtype=torch.float32).sigmoid() * (end - start) + start
    else:
        alpha_bar = {"squaredcos_cap_v2": _cosine_alpha_bar, "laplace": _laplace_alpha_bar}[config.beta_schedule]
        # at most 0.999: the last step of the cosine would leave no signal
        ratios = (alpha_bar((i + 1) / steps) / alpha_bar(i / steps) for i in range(steps))
        betas = torch.tensor([min(1 - ratio, 0.999) for ratio in ratios], dtype=torch.float32)
    return _rescale_to_zero_snr(betas) if config.rescale_betas_zero_snr else betas


def make_alpha_bar(betas: Tensor) -> Tensor:
    """alpha_bar_t, diffusers' `alphas_cumprod`: (num_train_timesteps,) float32 with its bits."""
    return torch.cumprod(1.0 - betas, dim=0)


def spaced_timesteps(config: DiffusionConfig, num_inference_steps: int) -> Tensor:
    """The timesteps of a run, descending: (num_inference_steps,) int64 (Lin et al. 2024, table 2)."""
    total = config.num_train_timesteps
    try:
        steps = operator.index(num_inference_steps)
    except TypeError:
        raise InputError(f"num_inference_steps is {num_inference_steps!r}; it is a whole number") from None
    if not 1 <= steps <= total:
        raise InputError(f"num_inference_steps is {steps}; it is from 1 to the {total} steps of the training")
    if config.timestep_spacing == "linspace":
        timesteps = np.linspace(0, total - 1, steps).round()[::-1]
    elif config.timestep_spacing == "trailing":
        # arange may round to one value too many, a timestep of -1
        timesteps = np.round(np.arange(total, 0, -total / steps))[:steps] - 1
    else:
        timesteps = np.arange(steps)[::-1] * (total // steps) + config.steps_offset
    if not (timesteps[0] < total and timesteps[-1] >= 0):
        raise InputError(
            f"steps_offset {config.steps_offset} moves {steps} steps to timesteps {timesteps[-1]} to {timesteps[0]}, "
            f"outside the training's 0 to {total - 1}; use fewer steps or timestep_spacing trailing"
        )
    return torch.from_numpy(timesteps.astype(np.int64))


def custom_timesteps(config: DDPMConfig, timesteps: Sequence[int]) -> Tensor:
    """`timesteps` as a tensor, (steps,) int64. Raises InputError where they do not descend within the training's."""
    chain = torch.as_tensor(timesteps)
    last = config.num_train_timesteps - 1
    if chain.ndim != 1 or len(chain) == 0 or chain.is_floating_point():
        raise InputError("timesteps is not a list of whole numbers; give at least one")
    chain = chain.to("cpu", torch.int64)
    if not (chain[1:] < chain[:-1]).all():
        raise InputError("timesteps do not descend; give each once, from noise to picture")
    if chain[0] > last or chain[-1] < 0:
        raise InputError(f"timesteps {int(chain[0])} to {int(chain[-1])} leave the training's {last} to 0")
    return chain


def ddpm_following(timesteps: Tensor) -> Tensor:
    """The timestep that each step goes to: the next of the list, -1 after the last."""
    return torch.cat([timesteps[1:], timesteps.new_tensor([-1])])


def ddim_following(config: DDIMConfig, timesteps: Tensor, num_inference_steps: int) -> Tensor:
    """The timestep that each step goes to, negative after the last: not the next of the list, unlike DDPM's."""
    return timesteps - config.num_train_timesteps // num_inference_steps


def ddpm_rows(config: DDPMConfig, alpha_bar: Tensor, timesteps: Tensor, following: Tensor) -> Tensor:
    """One row for each step from `timesteps` to `following`, (steps, len(COLUMNS)) float32.

    `alpha_bar` is that of `make_alpha_bar`; both timesteps are (steps,) int64, a negative one is the picture itself.

    Raises InputError naming the option that leaves a step undefined.
    """
    if config.variance_type == "fixed_large_log":
        raise InputError("variance_type fixed_large_log is the root of a negative number; use fixed_large")
    p = _marginals(alpha_bar, timesteps, following, 1.0)
    variance = p.variance.clamp(min=1e-20)  # for its logarithm
    std = {"fixed_small": variance.sqrt(), "fixed_small_log": variance.sqrt(), "fixed_large": p.beta.sqrt()}
    ranged = config.variance_type == "learned_range"
    columns = _x0_columns(config.prediction_type, p) | {
        # eq. 7
        "prev_x0": p.alpha_bar_prev.sqrt() * p.beta / p.beta_bar,
        "prev_x": p.alpha.sqrt() * p.beta_bar_prev / p.beta_bar,
        "sigma": std.get(config.variance_type, torch.ones_like(variance)) * (timesteps > 0),
        "log_variance_min": variance.log() if ranged else torch.zeros_like(variance),
        "log_variance_max": p.beta.clamp(min=1e-20).log() if ranged else torch.zeros_like(variance),
    }
    return _table(columns, config, timesteps, p)


def ddim_rows(
    config: DDIMConfig,
    alpha_bar: Tensor,
    timesteps: Tensor,
    following: Tensor,
    eta: float,
    use_clipped_model_output: bool,
) -> Tensor:
    """One row for each step from `timesteps` to `following`, (steps, len(COLUMNS)) float32; see `ddpm_rows`.

    Raises InputError naming the option that leaves a step undefined.
    """
    if not 0 <= eta < math.inf:
        raise InputError(f"eta is {eta}; it is from 0 (deterministic) to 1 (the variance of DDPM)")
    p = _marginals(alpha_bar, timesteps, following, 1.0 if config.set_alpha_to_one else alpha_bar[0].item())
    # in float32 as diffusers, see `_marginals`: where sigma takes all of beta_bar_prev, what is left is roundings
    sigma = eta * p.variance.float() ** 0.5
    squared = p.beta_bar_prev.float() - sigma**2
    if (squared < -1e-6).any():  # more than a rounding
        raise InputError(f"eta is {eta}, more noise than the next timestep has; use eta from 0 to 1")
    direction = squared.clamp(min=0).double().sqrt()  # of eps in x_{t-1}, eq. 12
    columns = _x0_columns(config.prediction_type, p) | {"prev_x0": p.alpha_bar_prev.sqrt(), "sigma": sigma.double()}
    if use_clipped_model_output:  # eps = (x_t - signal * x0) / noise, of the clipped x0
        columns["prev_x0"] = columns["prev_x0"] - direction * p.signal / p.noise
        columns["prev_x"] = direction / p.noise
    elif config.prediction_type == "epsilon":
        columns["prev_m"] = direction
    elif config.prediction_type == "sample":  # the same eps, of the x0 before clipping
        columns["prev_x"], columns["prev_m"] = direction / p.noise, -direction * p.signal / p.noise
    else:  # eps = signal * v + noise * x_t
        columns["prev_x"], columns["prev_m"] = direction * p.noise, direction * p.signal
    return _table(columns, config, timesteps, p)


@dataclass(frozen=True)
class _Marginals:
    """The forward process at the two ends of each step, (steps,) float64."""

    alpha_bar: Tensor  # share of signal in the variance at timestep t
    alpha_bar_prev: Tensor  # and at the timestep that the step goes to
    beta_bar: Tensor  # 1 - alpha_bar
    beta_bar_prev: Tensor
    alpha: Tensor  # alpha_bar / alpha_bar_prev
    beta: Tensor  # 1 - alpha
    signal: Tensor  # sqrt(alpha_bar)
    noise: Tensor  # sqrt(beta_bar)
    variance: Tensor  # of the posterior q(x_{t-1} | x_t, x_0)


def _marginals(alphas_cumprod: Tensor, timesteps: Tensor, following: Tensor, final: float) -> _Marginals:
    # Rounded to float32 as diffusers rounds them, for cancellations would show the difference. At small timesteps beta
    # and beta_bar are what float32 leaves of 1 - 0.9999: exact ones change a step by up to 5e-4. At large ones x0 is
    # (x_t - noise * eps) / signal: an ulp of noise, 160 times as large, is 4e-5 of a clipped x0.
    alpha_bar = alphas_cumprod[timesteps]
    alpha_bar_prev = torch.where(following >= 0, alphas_cumprod[following.clamp(min=0)], final)
    beta_bar, beta_bar_prev, alpha = 1 - alpha_bar, 1 - alpha_bar_prev, alpha_bar / alpha_bar_prev
    beta = 1 - alpha
    roots_and_variance = alpha_bar**0.5, beta_bar**0.5, beta_bar_prev / beta_bar * beta
    rounded = alpha_bar, alpha_bar_prev, beta_bar, beta_bar_prev, alpha, beta, *roots_and_variance
    return _Marginals(*(value.double() for value in rounded))


def _x0_columns(prediction_type: str, p: _Marginals) -> dict[str, Tensor]:
    zero, one = torch.zeros_like(p.alpha_bar), torch.ones_like(p.alpha_bar)
    x0_x, x0_m, x0_div = {
        "epsilon": (one, -p.noise, p.signal),
        "sample": (zero, one, one),
        "v_prediction": (p.signal, -p.noise, one),
    }[prediction_type]
    return {"x0_x": x0_x, "x0_m": x0_m, "x0_div": x0_div}


def _table(columns: dict[str, Tensor], config: DiffusionConfig, timesteps: Tensor, p: _Marginals) -> Tensor:
    """The columns side by side, absent ones zero; InputError where a step is undefined."""
    zero = torch.zeros_like(p.alpha_bar)
    rows = torch.stack([columns.get(name, zero) for name in COLUMNS], dim=1)
    undefined = ~rows.isfinite().all(dim=1)
    if step_options(config).clip_range is None:  # clipping brings an infinite x0 back, as it does in diffusers
        undefined |= columns["x0_div"] == 0
    if undefined.any():
        first = int(undefined.nonzero()[0])
        timestep, alpha_bar = int(timesteps[first]), p.alpha_bar[first].item()
        if rows[first].isfinite().all():
            raise InputError(
                f"prediction_type epsilon divides by the signal, of which none is left at timestep {timestep}; use "
                "v_prediction, clip_sample, timestep_spacing leading, or betas without rescale_betas_zero_snr"
            )
        raise InputError(
            f"the betas give no step at timestep {timestep}, where alpha_bar is {alpha_bar:g}; they are above 0 and "
            "below 1: change beta_start, beta_end or trained_betas"
        )
    return rows.float()


def _check_option(name: str, value: Any, default: Any) -> None:
    kinds = {bool: bool, int: Integral, float: Real, str: str}
    kind = kinds.get(type(default))
    if kind and (not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool)):
        raise InputError(f"{name} is {value!r}; it is of type {type(default).__name__}")


def _numbers(name: str, values: Iterable[float]) -> tuple[float, ...]:
    try:
        return tuple(map(float, values))
    except (TypeError, ValueError):
        raise InputError(f"{name} is not a list of numbers; give one beta for each training step") from None


def _cosine_alpha_bar(time: float) -> float:
    """Nichol & Dhariwal 2021, eq. 17."""
    return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2


def _laplace_alpha_bar(time: float) -> float:
    """Hang et al. 2024, table 1, as diffusers has it."""
    log_snr = -0.5 * math.copysign(1, 0.5 - time) * math.log(1 - 2 * abs(0.5 - time) + 1e-6)
    snr = math.exp(log_snr)
    return math.sqrt(snr / (1 + snr))


def _rescale_to_zero_snr(betas: Tensor) -> Tensor:
    """Lin et al. 2024, algorithm 1: shift and scale sqrt(alpha_bar) so that the last timestep is pure noise."""
    root = make_alpha_bar(betas).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    alpha_bar = ((root - last) * (first / (first - last))) ** 2
    return 1 - torch.cat([alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1]])

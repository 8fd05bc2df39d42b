"""Options of the samplers, read from diffusers' scheduler_config.json and checked. Imports no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

from fastdiff.checkpoints.json_files import from_mapping
from fastdiff.checkpoints.limits import MAX_TRAIN_STEPS
from fastdiff.errors import InputError

Config = TypeVar("Config", bound="DiffusionConfig")


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
    """The options that diffusers' DDPMScheduler and DDIMScheduler share, with their names and defaults."""

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

    def __post_init__(self) -> None:
        """Raises InputError naming an option of a wrong type or value."""
        for field in fields(self):
            _check_option(field.name, getattr(self, field.name), field.default)
        if self.num_train_timesteps < 1:
            raise InputError(f"num_train_timesteps is {self.num_train_timesteps}; it is 1 or more")
        if self.num_train_timesteps > MAX_TRAIN_STEPS:
            raise InputError(f"num_train_timesteps is over {MAX_TRAIN_STEPS}, the most that fastdiff takes")
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
    def from_mapping(cls: type[Config], mapping: Mapping[str, Any], source: str = "scheduler config") -> Config:
        """Read a scheduler_config.json or the `.config` of a scheduler, ours or diffusers', of either kind.

        Raises InputError naming an option that no scheduler of diffusers has, or a wrong value.
        """
        own = {field.name for field in fields(cls)}
        # diffusers marks the values that nobody set: another scheduler takes its own default instead
        defaults = set(mapping.get("_use_default_values", ()))
        skipped = (FOREIGN_OPTIONS - own) | defaults
        return from_mapping(cls, {key: value for key, value in mapping.items() if key not in skipped}, source)

    @property
    def variance(self) -> str:
        """Where a step's variance comes from, one of `kernels.denoise.VARIANCES`: the betas, or the model."""
        return "fixed"


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

    @property
    def variance(self) -> str:
        return self.variance_type if self.variance_type.startswith("learned") else "fixed"


@dataclass(frozen=True, kw_only=True)
class DDIMConfig(DiffusionConfig):
    """The options of diffusers' DDIMScheduler."""

    set_alpha_to_one: bool = True  # the alpha_bar after the last step is 1, else that of timestep 0

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = DiffusionConfig.CHOICES | {
        "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    }


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

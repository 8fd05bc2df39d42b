"""Options shared by samplers, read from diffusers' scheduler_config.json and checked.

A sampler's config inherits the groups of options that it supports, and adds its own options in the sampler's file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Interval, Len

from fastdiff.arguments import naming
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_TRAIN_STEPS, Fraction, PositiveNumber, TrainSteps
from fastdiff.sampler_names import SAMPLERS
from fastdiff.schema import Schema, checked

AnyConfig = TypeVar("AnyConfig", bound="DiffusionConfig")

FinalSigma = Literal["zero", "sigma_min"]  # after the last step
SolverPrediction = Literal["epsilon", "sample", "v_prediction", "flow_prediction"]
VarianceType = Literal["fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", "learned", "learned_range"]

# Options of schedulers that fastdiff does not have, and of early diffusers releases
_OPTIONS_OF_OTHERS = frozenset(
    """
    corrector_order noise_sampler_seed predict_epsilon predictor_order rho sigma_data sigma_schedule tau_func
    tensor_format timestep_values
    """.split()  # noqa: SIM905 (a list would take a page)
)


def marked_defaults(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options that diffusers marks as left at their defaults. Another scheduler uses its own defaults."""
    return checked("_use_default_values", config.get("_use_default_values"), tuple[str, ...] | None) or ()


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(Schema):
    """The options of the forward process and its timesteps, which diffusers schedulers share."""

    num_train_timesteps: TrainSteps = 1000
    beta_start: Fraction = 0.0001
    beta_end: Fraction = 0.02
    beta_schedule: str = "linear"
    # Replaces beta_start, beta_end and beta_schedule
    trained_betas: Annotated[tuple[Fraction, ...], Len(1, MAX_TRAIN_STEPS)] | None = None
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    timestep_spacing: Literal["leading", "trailing", "linspace"] = "leading"
    steps_offset: Annotated[int, Interval(ge=-MAX_TRAIN_STEPS, le=MAX_TRAIN_STEPS)] = 0  # only read with leading

    BETA_SCHEDULES: ClassVar[tuple[str, ...]] = ("linear", "scaled_linear", "squaredcos_cap_v2")
    LACKS: ClassVar[frozenset[str]] = frozenset()  # inherited options that diffusers' class does not have

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the scheduler's options."""
        return tuple(field.name for field in fields(cls) if field.name not in cls.LACKS)

    def check(self) -> None:
        if self.trained_betas is None:
            checked("beta_schedule", self.beta_schedule, Literal[self.BETA_SCHEDULES])
        elif len(self.trained_betas) < self.num_train_timesteps:
            raise InputError(
                f"trained_betas has {len(self.trained_betas)} values for {self.num_train_timesteps} training steps;"
                " give one for each, or lower num_train_timesteps"
            )

    @property
    def variance(self) -> str:
        """The source of a step's variance, one of `kernels.denoise.VARIANCES`: the betas, or the model."""
        return "fixed"

    @classmethod
    def from_mapping(
        cls: type[AnyConfig], mapping: Mapping[str, Any], source: object = "scheduler config"
    ) -> AnyConfig:
        """Read a scheduler_config.json, or the `.config` of any fastdiff or diffusers scheduler.

        Options of other schedulers are ignored. Raises InputError that names an option unknown to every diffusers
        scheduler, or a wrong value.
        """
        with naming(str(source)):
            defaults = marked_defaults(mapping)
        skipped = FOREIGN_OPTIONS.difference(cls.names()).union(defaults)
        return super().from_mapping({key: value for key, value in mapping.items() if key not in skipped}, source)


@dataclass(frozen=True, kw_only=True)
class ZeroSNRConfig(DiffusionConfig):
    """The option of schedulers that can make the last timestep pure noise."""

    rescale_betas_zero_snr: bool = False


@dataclass(frozen=True, kw_only=True)
class ClippingConfig(DiffusionConfig):
    """The options of schedulers that can clip x0."""

    clip_sample: bool = True
    clip_sample_range: PositiveNumber = 1.0


@dataclass(frozen=True, kw_only=True)
class ThresholdingConfig(DiffusionConfig):
    """The options of schedulers that can scale x0 by a quantile of `|x0|` instead of clipping it."""

    thresholding: bool = False
    dynamic_thresholding_ratio: Fraction = 0.995
    sample_max_value: PositiveNumber = 1.0


@dataclass(frozen=True, kw_only=True)
class SigmaConfig(DiffusionConfig):
    """The options of schedulers whose steps go from one noise level sigma to the next."""

    timestep_spacing: Literal["leading", "trailing", "linspace"] = "linspace"

    @property
    def sigma_spacing(self) -> str | None:
        """The spacing of the sigmas: karras, exponential, beta or lu. None: the timesteps determine the sigmas."""
        return None


@dataclass(frozen=True, kw_only=True)
class SpacedSigmaConfig(SigmaConfig):
    """The options of schedulers that can space the sigmas independently of the timesteps."""

    use_karras_sigmas: bool | None = False
    use_exponential_sigmas: bool | None = False
    use_beta_sigmas: bool | None = False

    def check(self) -> None:
        super().check()
        if len(self._spacings()) > 1:
            named = " and ".join(f"use_{name}_sigmas" for name in self._spacings())
            raise InputError(f"{named} exclude each other; choose one")

    def _spacings(self) -> list[str]:
        return [name for name in ("karras", "exponential", "beta") if getattr(self, f"use_{name}_sigmas")]

    @property
    def sigma_spacing(self) -> str | None:
        return next(iter(self._spacings()), None)


@dataclass(frozen=True, kw_only=True)
class FlowConfig(SpacedSigmaConfig, ThresholdingConfig):
    """The options of multistep solvers, which can also follow a flow x_t = (1 - sigma) x_0 + sigma eps."""

    prediction_type: SolverPrediction = "epsilon"  # type: ignore[assignment]  # one more than other schedulers have
    use_flow_sigmas: bool | None = False
    flow_shift: PositiveNumber = 1.0  # only read with use_flow_sigmas
    use_dynamic_shifting: bool = False  # lets `mu` of a run replace flow_shift by exp(mu)
    time_shift_type: Literal["exponential"] = "exponential"  # only read with use_dynamic_shifting

    SPACINGS_OF_FLOWS: ClassVar[tuple[str, ...]] = ()  # the spacings that use_flow_sigmas can be combined with

    def check(self) -> None:
        super().check()
        if self.use_flow_sigmas and self.sigma_spacing not in ("flow", *self.SPACINGS_OF_FLOWS):
            raise InputError(f"use_flow_sigmas excludes {self.sigma_spacing} sigmas; choose one of the two")

    @property
    def sigma_spacing(self) -> str | None:
        return super().sigma_spacing or ("flow" if self.use_flow_sigmas else None)


# A scheduler file may hold options of other schedulers, and diffusers ignores them. Any other key is an error, because
# it could change the picture.
_GROUPS = (ZeroSNRConfig, ClippingConfig, FlowConfig)
FOREIGN_OPTIONS = _OPTIONS_OF_OTHERS.union(
    *(sampler.defaults for sampler in SAMPLERS.values()),
    *({field.name for field in fields(group)} for group in _GROUPS),
)

"""Options of the samplers, read from diffusers' scheduler_config.json and checked. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Interval, Len
from pydantic import AllowInfNan, BeforeValidator

from fastdiff.arguments import naming
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_TRAIN_STEPS, Fraction, NotNegative, PositiveNumber, TrainSteps
from fastdiff.schema import Schema, checked

AnyConfig = TypeVar("AnyConfig", bound="DiffusionConfig")

FinalSigma = Literal["zero", "sigma_min"]  # after the last step
VarianceType = Literal["fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", "learned", "learned_range"]

# What other schedulers have under names of DPMSolverMultistepScheduler's options, and what it takes instead
_INSTEAD = {"logrho": "midpoint", "bh1": "midpoint", "bh2": "midpoint"}
_OF_UNIPC = BeforeValidator(lambda value: "bh2" if value in ("midpoint", "heun", "logrho") else value)
_OF_OTHERS = BeforeValidator(lambda value: _INSTEAD.get(value, value) if isinstance(value, str) else value)


# Options of diffusers' other schedulers, of those that we have, and of its early releases: a scheduler file may carry
# them and diffusers ignores them. Any further key is an error, since it could change the picture.
FOREIGN_OPTIONS = frozenset(
    """
    algorithm_type clip_sample clip_sample_range corrector_order disable_corrector dynamic_thresholding_ratio
    euler_at_final final_sigmas_type flow_shift interpolation_type lambda_min_clipped lower_order_final
    noise_sampler_seed original_inference_steps predict_epsilon predict_x0 predictor_order
    rescale_betas_zero_snr rho sample_max_value set_alpha_to_one shift_terminal sigma_data sigma_max sigma_min
    sigma_schedule skip_prk_steps solver_order solver_p solver_type tau_func tensor_format thresholding
    time_shift_type timestep_scaling timestep_type timestep_values use_beta_sigmas use_dynamic_shifting
    use_exponential_sigmas use_flow_sigmas use_karras_sigmas use_lu_lambdas variance_type
    """.split()  # noqa: SIM905 (a list would be a page)
)


def marked_defaults(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options that diffusers marks as set by nobody: another scheduler takes its own default instead."""
    return checked("_use_default_values", config.get("_use_default_values"), tuple[str, ...] | None) or ()


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(Schema):
    """The options that diffusers' schedulers share: of the forward process and its timesteps."""

    num_train_timesteps: TrainSteps = 1000
    beta_start: Fraction = 0.0001
    beta_end: Fraction = 0.02
    beta_schedule: str = "linear"
    # Replaces the four above, but for num_train_timesteps
    trained_betas: Annotated[tuple[Fraction, ...], Len(1, MAX_TRAIN_STEPS)] | None = None
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    timestep_spacing: Literal["leading", "trailing", "linspace"] = "leading"
    steps_offset: Annotated[int, Interval(ge=-MAX_TRAIN_STEPS, le=MAX_TRAIN_STEPS)] = 0  # of leading

    BETA_SCHEDULES: ClassVar[tuple[str, ...]] = ("linear", "scaled_linear", "squaredcos_cap_v2")

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
        """Where a step's variance comes from, one of `kernels.denoise.VARIANCES`: the betas, or the model."""
        return "fixed"

    @classmethod
    def from_mapping(
        cls: type[AnyConfig], mapping: Mapping[str, Any], source: object = "scheduler config"
    ) -> AnyConfig:
        """Read a scheduler_config.json or the `.config` of a scheduler, ours or diffusers', of either kind.

        Raises InputError naming an option that no scheduler of diffusers has, or a wrong value.
        """
        own = {field.name for field in fields(cls)}
        with naming(str(source)):
            defaults = marked_defaults(mapping)
        skipped = (FOREIGN_OPTIONS - own).union(defaults)
        return super().from_mapping({key: value for key, value in mapping.items() if key not in skipped}, source)


@dataclass(frozen=True, kw_only=True)
class ZeroSNRConfig(DiffusionConfig):
    """The option of those that can make the last timestep pure noise."""

    rescale_betas_zero_snr: bool = False


@dataclass(frozen=True, kw_only=True)
class ClippingConfig(DiffusionConfig):
    """The options of those that can clip x0."""

    clip_sample: bool = True
    clip_sample_range: PositiveNumber = 1.0


@dataclass(frozen=True, kw_only=True)
class ThresholdingConfig(DiffusionConfig):
    """The options of those that can scale x0 by a quantile of it, instead of clipping."""

    thresholding: bool = False
    dynamic_thresholding_ratio: Fraction = 0.995
    sample_max_value: PositiveNumber = 1.0


@dataclass(frozen=True, kw_only=True)
class DDPMConfig(ClippingConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' DDPMScheduler."""

    variance_type: VarianceType = "fixed_small"

    BETA_SCHEDULES: ClassVar[tuple[str, ...]] = (*DiffusionConfig.BETA_SCHEDULES, "sigmoid", "laplace")

    @property
    def variance(self) -> str:
        return self.variance_type if self.variance_type.startswith("learned") else "fixed"


@dataclass(frozen=True, kw_only=True)
class DDIMConfig(ClippingConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' DDIMScheduler."""

    set_alpha_to_one: bool = True  # the alpha_bar after the last step is 1, else that of timestep 0


@dataclass(frozen=True, kw_only=True)
class SigmaConfig(DiffusionConfig):
    """The options of diffusers' schedulers whose steps go from one noise level sigma to the next."""

    timestep_spacing: Literal["leading", "trailing", "linspace"] = "linspace"

    @property
    def sigma_spacing(self) -> str | None:
        """The way that the sigmas are spaced in, where it is not the timesteps'."""
        return None


@dataclass(frozen=True, kw_only=True)
class SpacedSigmaConfig(SigmaConfig):
    """The options of those that can space the sigmas in other ways than the timesteps."""

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
class EulerConfig(SpacedSigmaConfig, ZeroSNRConfig):
    """The options of diffusers' EulerDiscreteScheduler."""

    interpolation_type: Literal["linear", "log_linear"] = "linear"
    sigma_min: PositiveNumber | None = None  # of the other spacings
    sigma_max: PositiveNumber | None = None
    final_sigmas_type: FinalSigma = "zero"
    timestep_type: Literal["discrete", "continuous"] = "discrete"

    @property
    def tells_log_sigma(self) -> bool:
        """Whether the model is told log(sigma) / 4 for a timestep: continuous types do so for velocities alone."""
        return self.timestep_type == "continuous" and self.prediction_type == "v_prediction"


@dataclass(frozen=True, kw_only=True)
class EulerAncestralConfig(SigmaConfig, ZeroSNRConfig):
    """The options of diffusers' EulerAncestralDiscreteScheduler."""

    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"


@dataclass(frozen=True, kw_only=True)
class LMSConfig(SpacedSigmaConfig):
    """The options of diffusers' LMSDiscreteScheduler."""


@dataclass(frozen=True, kw_only=True)
class HeunConfig(SpacedSigmaConfig, ClippingConfig):
    """The options of diffusers' HeunDiscreteScheduler."""

    beta_start: Fraction = 0.00085
    beta_end: Fraction = 0.012
    clip_sample: bool = False

    BETA_SCHEDULES: ClassVar[tuple[str, ...]] = (*DiffusionConfig.BETA_SCHEDULES, "exp")


@dataclass(frozen=True, kw_only=True)
class LCMConfig(ClippingConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' LCMScheduler; the timesteps are its own, whatever timestep_spacing and steps_offset."""

    beta_start: Fraction = 0.00085
    beta_end: Fraction = 0.012
    beta_schedule: str = "scaled_linear"
    original_inference_steps: TrainSteps = 50  # that the model was distilled for
    clip_sample: bool = False
    set_alpha_to_one: bool = True  # the alpha_bar of a timestep below zero, to which no step goes
    timestep_scaling: NotNegative = 10.0  # of the boundary condition


@dataclass(frozen=True, kw_only=True)
class DPMSolverConfig(SpacedSigmaConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' DPMSolverMultistepScheduler; flows and the deprecated solvers are not here."""

    solver_order: Annotated[int, Interval(ge=1, le=3)] = 2
    algorithm_type: Literal["dpmsolver++", "sde-dpmsolver++"] = "dpmsolver++"
    solver_type: Annotated[Literal["midpoint", "heun"], _OF_OTHERS] = "midpoint"
    lower_order_final: bool = True  # of fewer than 15 steps
    euler_at_final: bool = False
    use_lu_lambdas: bool | None = False
    use_flow_sigmas: Literal[False] | None = False
    flow_shift: float = 1.0  # of use_flow_sigmas
    final_sigmas_type: FinalSigma = "zero"
    lambda_min_clipped: Annotated[float, AllowInfNan()] = -math.inf
    variance_type: VarianceType | None = None  # the model's channels of a learned one are left aside
    use_dynamic_shifting: Literal[False] = False
    time_shift_type: Literal["exponential"] = "exponential"  # of use_dynamic_shifting

    @property
    def learns_variance(self) -> bool:
        """Whether the model's output has channels of a variance."""
        return (self.variance_type or "").startswith("learned")

    @property
    def stochastic(self) -> bool:
        """Whether steps add noise."""
        return self.algorithm_type == "sde-dpmsolver++"

    @property
    def sigma_spacing(self) -> str | None:
        spacing = super().sigma_spacing
        return "lu" if self.use_lu_lambdas and spacing != "karras" else spacing


@dataclass(frozen=True, kw_only=True)
class PNDMConfig(DiffusionConfig):
    """The options of diffusers' PNDMScheduler. Runge-Kutta steps before the linear ones are not here."""

    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"
    skip_prk_steps: bool = False
    set_alpha_to_one: bool = False  # the alpha_bar after the last step is 1, else that of timestep 0

    def check(self) -> None:
        super().check()
        if not self.skip_prk_steps:
            raise InputError("skip_prk_steps False is not supported; fastdiff runs PNDM with skip_prk_steps True only")


@dataclass(frozen=True, kw_only=True)
class UniPCConfig(SpacedSigmaConfig, ThresholdingConfig, ZeroSNRConfig):
    """The options of diffusers' UniPCMultistepScheduler; flows, predict_x0 False and solver_p are not here."""

    solver_order: Annotated[int, Interval(ge=1, le=3)] = 2
    predict_x0: Literal[True] = True
    solver_type: Annotated[Literal["bh1", "bh2"], _OF_UNIPC] = "bh2"
    lower_order_final: bool = True
    disable_corrector: tuple[Annotated[int, Interval(ge=0)], ...] = ()  # steps that the next one does not correct
    solver_p: Literal[None] = None
    use_flow_sigmas: Literal[False] | None = False
    flow_shift: float = 1.0  # of use_flow_sigmas
    use_dynamic_shifting: Literal[False] = False
    time_shift_type: Literal["exponential"] = "exponential"  # of use_dynamic_shifting
    final_sigmas_type: FinalSigma = "zero"
    sigma_min: PositiveNumber | None = None  # of the other spacings
    sigma_max: PositiveNumber | None = None
    shift_terminal: Literal[None] = None

    def check(self) -> None:
        super().check()
        if self.final_sigmas_type == "zero" and self.solver_order > 1 and not self.lower_order_final:
            raise InputError("lower_order_final False has no step to sigma zero; use final_sigmas_type sigma_min")

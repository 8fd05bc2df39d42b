"""Every default, once: what is drawn, and how, where a request leaves it open.

A request wins over the model's fastdiff.json, that over the constants here. The command, the page and
`Pipeline.stream` differ in what their `Defaults` say and in nothing else. Imports no torch.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo

MODEL = "emoji-sd"
MODEL_OF_LABELS = "emoji64"  # where a request has labels and names no model
DEVICE = "auto"  # a GPU where there is one
DTYPE: Final = "auto"  # float32 on a CPU, bfloat16 on a GPU
PRECISION: Final = "full"  # of weights: that of the dtype
SEED = 0
SCHEDULER = "ddim"  # that the page's form shows for a folder whose own scheduler is none of ours
STEPS = 50  # as diffusers' DDIMPipeline and DiTPipeline
VERIFICATION_STEPS = 4  # enough for each kind of step: the first, one between, the last
CPU_STEPS = 20  # of the page: on a CPU a first picture should come within seconds
ETA = 0.0  # diffusers' DDIMPipeline; plain DDIM of Song et al. 2021 adds no noise
USE_CLIPPED_MODEL_OUTPUT = False  # diffusers' DDIMPipeline, where None is False
GUIDANCE_SCALE = 1.0  # unguided


@dataclass(frozen=True)
class Defaults:
    """The choices in which the ways to ask for pictures differ."""

    labels: int  # labels or groups, evenly spread from the model's first to its last; 0: the null label alone
    prompts: int  # the first of those that the model's fastdiff.json gives; 0: none
    pictures: int  # of all labels or prompts together; each has at least one
    batch_size: int | None  # pictures drawn side by side; None: all of them
    ddpm_steps: int | None = STEPS  # None: all training steps
    most_steps: int | None = None  # fewer than the model asks for
    most_pictures: int = 50_000  # of one run


EVERY = 2**31  # labels or prompts: more than any model has
COMMAND = Defaults(labels=4, prompts=4, pictures=4, batch_size=8)
BULK = Defaults(labels=EVERY, prompts=EVERY, pictures=1, batch_size=None, most_pictures=1_000_000)
PAGE = Defaults(labels=1, prompts=1, pictures=1, batch_size=16)
PAGE_ON_CPU = replace(PAGE, batch_size=2, most_steps=CPU_STEPS)
# Who gives a DDPM folder to diffusers' DDPMPipeline gets all training steps, and so it is in Python. Who types
# `fastdiff sample` waits for pictures: 50 steps show what the model can do.
LIBRARY = Defaults(labels=0, prompts=0, pictures=1, batch_size=None, ddpm_steps=None)


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the way from noise to a picture; None leaves one open."""

    scheduler: str | None = None  # one of sampler_names.SCHEDULERS
    num_inference_steps: int | None = None
    eta: float | None = None  # of DDIM
    use_clipped_model_output: bool | None = None  # of DDIM
    guidance_scale: float | None = None


@dataclass(frozen=True)
class Sampling(SamplingOptions):
    """Options with every choice made. Those of DDIM stay None for all other schedulers."""

    num_inference_steps: int = STEPS
    guidance_scale: float = GUIDANCE_SCALE


@dataclass(frozen=True)
class ModelFacts:
    """The facts that defaults depend on: a ModelCard has them from JSON files, a Pipeline from its parts."""

    info: ModelInfo
    scheduler: str | None  # that the folder names; None where it is none of ours
    num_train_timesteps: int
    reads_text: bool = False

    @classmethod
    def of(cls, card: ModelCard) -> "ModelFacts":
        return cls(card.info, card.scheduler, card.num_train_timesteps, card.reads_text)

    @property
    def default_scheduler(self) -> str | None:
        return self.info.scheduler or self.scheduler


def model_of(*, labelled: bool) -> str:
    """The model of a request that names none; `labelled` where it names a label."""
    return MODEL_OF_LABELS if labelled else MODEL


def complete_sampling(asked: SamplingOptions, model: ModelFacts, defaults: Defaults, *, labelled: bool) -> Sampling:
    """`asked` with its open options chosen; what is asked for is not checked.

    labelled: whether the pictures have labels, so that they can be guided.
    """
    info = model.info
    scheduler = asked.scheduler or model.default_scheduler
    is_ddpm = scheduler == "ddpm" and not model.reads_text
    is_ddim = scheduler in ("ddim", None)
    steps = info.num_inference_steps or (defaults.ddpm_steps if is_ddpm else STEPS) or model.num_train_timesteps
    steps = min(steps, model.num_train_timesteps, defaults.most_steps or steps)
    guidable = model.reads_text or (labelled and info.null_label is not None)
    guidance_scale = info.guidance_scale if guidable else None
    return Sampling(
        scheduler=scheduler,
        num_inference_steps=_first(asked.num_inference_steps, steps),
        eta=_first(asked.eta, info.eta, ETA) if is_ddim else asked.eta,
        use_clipped_model_output=_first(
            asked.use_clipped_model_output, info.use_clipped_model_output, USE_CLIPPED_MODEL_OUTPUT
        )
        if is_ddim
        else asked.use_clipped_model_output,
        guidance_scale=_first(asked.guidance_scale, guidance_scale, GUIDANCE_SCALE),
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)

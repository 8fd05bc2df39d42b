"""All defaults: what to draw, and how, where a request leaves it open.

A request overrides the model's fastdiff.json, which overrides the constants here. The command and the page draw a
model with the same steps, scheduler and guidance. They and `Pipeline.stream` differ only in their `Defaults`. Imports
no torch.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.sampler_names import ETAS

MODEL = "emoji-sd"
MODEL_OF_LABELS = "emoji64"  # for a request with labels and no model
DEVICE = "auto"  # a GPU if there is one
DTYPE: Final = "auto"  # float32 on a CPU, bfloat16 on a GPU
PRECISION: Final = "full"  # weights in the model's dtype
SEED = 0
SCHEDULER = "ddim"  # what the page shows for a folder whose own scheduler fastdiff does not have
STEPS = 50  # as in diffusers' DDIMPipeline and DiTPipeline
VERIFICATION_STEPS = 4  # covers each kind of step: first, middle and last
ETA = 0.0  # as in diffusers' DDIMPipeline and StableDiffusionPipeline, which also pass it to TCD
USE_CLIPPED_MODEL_OUTPUT = False  # as in diffusers' DDIMPipeline, where None means False
GUIDANCE_SCALE = 1.0  # unguided
STRENGTH, STRENGTH_OF_SDXL = 0.8, 0.3  # of image to image, as in diffusers
STRENGTH_OF_CAPTIONS = 0.6  # of image to image with Z-Image, as in diffusers
MASKED_STRENGTH, MASKED_STRENGTH_OF_SDXL = 1.0, 0.9999  # of inpainting, as in diffusers
UPSCALE_STRENGTH = 0.5
CONTROL_SCALE, CONTROL_SCALE_FROM_IMAGE, CONTROL_SCALE_MASKED = 1.0, 0.8, 0.5  # of ControlNets, as in diffusers
UPSCALE_MODE: Final = "pixels"
CLIP_SKIP = 0  # uses all layers of the text encoder


@dataclass(frozen=True)
class Defaults:
    """The defaults in which the command, the page and the library differ."""

    labels: int  # labels or groups, evenly spaced from the model's first to its last; 0: only the null label
    prompts: int  # how many of the example prompts in the model's fastdiff.json; 0: none
    pictures: int  # over all labels or prompts, at least one each
    batch_size: int | None  # None: all pictures in one batch
    ddpm_steps: int | None = STEPS  # None: all training steps
    most_pictures: int = 50_000  # per run


# A CPU computes each picture of a batch on its own: a batch saves no time, and its pictures all come at its end.
BATCH_ON_CPU = 1
EVERY = 2**31  # labels or prompts: more than any model has
COMMAND = Defaults(labels=4, prompts=4, pictures=4, batch_size=8)  # on a CPU, BATCH_ON_CPU
BULK = Defaults(labels=EVERY, prompts=EVERY, pictures=1, batch_size=None, most_pictures=1_000_000)
PAGE = Defaults(labels=1, prompts=1, pictures=1, batch_size=16)
PAGE_ON_CPU = replace(PAGE, batch_size=BATCH_ON_CPU)
# In Python, a DDPM folder runs all training steps, as in diffusers' DDPMPipeline. A user of `fastdiff sample` waits for
# the pictures, and 50 steps show what the model can do.
LIBRARY = Defaults(labels=0, prompts=0, pictures=1, batch_size=None, ddpm_steps=None)


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the sampling; None leaves one open."""

    scheduler: str | None = None  # one of sampler_names.SCHEDULERS
    num_inference_steps: int | None = None
    eta: float | None = None  # only of samplers in sampler_names.ETAS
    use_clipped_model_output: bool | None = None  # only DDIM
    guidance_scale: float | None = None


@dataclass(frozen=True)
class Sampling(SamplingOptions):
    """Options with every choice made. Options of other schedulers stay None."""

    num_inference_steps: int = STEPS
    guidance_scale: float = GUIDANCE_SCALE


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that defaults depend on, from a ModelCard's JSON files or a Pipeline's parts."""

    info: ModelInfo
    scheduler: str | None  # the folder's own; None if fastdiff does not have it
    num_train_timesteps: int
    reads_text: bool = False

    @classmethod
    def of(cls, card: ModelCard) -> "ModelFacts":
        return cls(card.info, card.scheduler, card.num_train_timesteps, card.reads_text)

    @property
    def default_scheduler(self) -> str | None:
        return self.info.scheduler or self.scheduler


def model_of(*, labelled: bool) -> str:
    """Return the default model; `labelled`: whether the request names a label."""
    return MODEL_OF_LABELS if labelled else MODEL


def strength_of(*, of_sdxl: bool, masked: bool, controlled: bool = False, of_captions: bool = False) -> float:
    """Return the default strength of a run from a picture.

    masked: of inpainting; controlled: by ControlNets; of_captions: with Z-Image.
    """
    if of_captions and not masked:
        return STRENGTH_OF_CAPTIONS
    if masked:
        return MASKED_STRENGTH_OF_SDXL if of_sdxl else MASKED_STRENGTH
    return STRENGTH_OF_SDXL if of_sdxl and not controlled else STRENGTH


def taken_steps(steps: int, strength: float, *, of_captions: bool) -> int:
    """Return how many of its steps a run from a picture takes; `of_captions`: with Z-Image."""
    return steps - int(steps - steps * strength) if of_captions else int(steps * strength)


def control_scale_of(*, of_sdxl: bool, from_image: bool, masked: bool) -> float:
    """Return the default scale of a ControlNet. `from_image`: in a run from a picture; `masked`: of inpainting."""
    if masked:
        return CONTROL_SCALE if of_sdxl else CONTROL_SCALE_MASKED
    return CONTROL_SCALE_FROM_IMAGE if from_image else CONTROL_SCALE


def complete_sampling(
    asked: SamplingOptions, model: ModelFacts, defaults: Defaults, *, labelled: bool, masked: bool = False
) -> Sampling:
    """Return `asked` with its open options chosen. The given options are not checked.

    The model's own eta is for DDIM, and for the sampler that the model names itself.

    labelled: whether the pictures have labels, so that guidance is possible.
    masked: whether a mask says what to paint anew.
    """
    info = model.info
    scheduler = asked.scheduler or model.default_scheduler
    is_ddpm = scheduler == "ddpm" and not model.reads_text
    is_ddim = scheduler in ("ddim", None)
    eta = ETA if scheduler is None or is_ddim or model.reads_text else ETAS.get(scheduler)
    own_eta = info.eta if is_ddim or scheduler == info.scheduler else None
    steps = info.num_inference_steps or (defaults.ddpm_steps if is_ddpm else STEPS) or model.num_train_timesteps
    steps = min(steps, model.num_train_timesteps)
    guidable = model.reads_text or (labelled and info.null_label is not None)
    guidance_scale = info.guidance_scale if guidable else None
    if masked and info.guidance_scale_with_mask is not None:
        guidance_scale = info.guidance_scale_with_mask
    return Sampling(
        scheduler=scheduler,
        num_inference_steps=_first(asked.num_inference_steps, steps),
        eta=_first(asked.eta, own_eta, eta) if is_ddim or scheduler in ETAS else asked.eta,
        use_clipped_model_output=_first(
            asked.use_clipped_model_output, info.use_clipped_model_output, USE_CLIPPED_MODEL_OUTPUT
        )
        if is_ddim
        else asked.use_clipped_model_output,
        guidance_scale=_first(asked.guidance_scale, guidance_scale, GUIDANCE_SCALE),
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)

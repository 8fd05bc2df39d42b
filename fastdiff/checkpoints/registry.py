"""The diffusers classes that fastdiff runs: pipelines, and the parts in a pipeline's folder.

To add a pipeline, add a row to PIPELINES: its parts, options, defaults, and the name of the fastdiff class that draws
with it. To add a model, add a part. This file imports no torch, so it knows fastdiff's classes by name only.
`Pipeline.kinds` and `Model.classes` hold the classes.
"""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from fastdiff.arguments import naming
from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig, AutoencoderTinyConfig
from fastdiff.checkpoints.configs.clip import CLIPTextConfig, CLIPTextConfigWithProjection, CLIPVisionConfig
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.configs.model import Library, ModelConfig
from fastdiff.checkpoints.configs.qwen3 import Qwen3Config
from fastdiff.checkpoints.configs.unet1d import UNet1DConfig
from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.configs.z_image import ZImageTransformer2DConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.errors import InputError
from fastdiff.refused import REFUSED_CLASSES
from fastdiff.schema import Wanted, checked

SHOWN = 8  # names in an error

# In model_index.json
ClassPair = Annotated[tuple[str, str], Wanted("a [library, class] pair of names; save the pipeline again")]


@dataclass(frozen=True)
class Part:
    """One part of a pipeline: its name in model_index.json, which is also its folder's, and its possible classes.

    The first class name is the current one, the others are older names. Without class names, any class of the library
    is accepted.
    """

    name: str
    classes: tuple[str, ...] = ()

    @property
    def library(self) -> Library:
        """The library that defines the classes."""
        return "diffusers"

    @property
    def class_name(self) -> str:
        """The current name of the class."""
        return self.classes[0]


@dataclass(frozen=True)
class ModelPart(Part):
    """A part with weights. The fastdiff class that runs it has diffusers' name."""

    config: type[ModelConfig] = ModelConfig
    in_8_bits: bool = False  # whether int8 and fp8 quantise its weights
    others: tuple["ModelPart", ...] = ()  # models of other classes that may have this name in a pipeline

    @property
    def library(self) -> Library:
        return self.config.LIBRARY

    def of_class(self, class_name: str) -> "ModelPart":
        """Return this part or the one of `others` that has a class of this name."""
        return next((part for part in self.others if class_name in part.classes), self)


@dataclass(frozen=True)
class TokenizerPart(Part):
    """A part that turns a prompt into token ids."""

    @property
    def library(self) -> Library:
        return "transformers"


@dataclass(frozen=True)
class DenoiserPart(ModelPart):
    """The part that is called at each step."""

    config: type[DenoiserConfig] = DenoiserConfig
    in_8_bits: bool = True


UNET = DenoiserPart("unet", ("UNet2DModel",), UNet2DConfig)
UNET_CONDITION = DenoiserPart("unet", ("UNet2DConditionModel",), UNet2DConditionConfig)
UNET_1D = DenoiserPart("unet", ("UNet1DModel",), UNet1DConfig)
TRANSFORMER = DenoiserPart("transformer", ("DiTTransformer2DModel", "Transformer2DModel"), DiTTransformer2DConfig)
Z_IMAGE = DenoiserPart("transformer", ("ZImageTransformer2DModel",), ZImageTransformer2DConfig)
# Weights of a VAE or value function are never in 8 bits: both are small, and a VAE's error would be in every picture.
TINY_VAE = ModelPart("vae", ("AutoencoderTiny",), AutoencoderTinyConfig)
VAE = ModelPart("vae", ("AutoencoderKL",), AutoencoderKLConfig, others=(TINY_VAE,))
CONTROLNET = DenoiserPart("controlnet", ("ControlNetModel", "MultiControlNetModel"), ControlNetConfig)
VALUE_FUNCTION = ModelPart("value_function", UNET_1D.classes, UNet1DConfig)
TEXT_ENCODER = ModelPart("text_encoder", ("CLIPTextModel",), CLIPTextConfig, in_8_bits=True)
TEXT_ENCODER_2 = ModelPart(
    "text_encoder_2", ("CLIPTextModelWithProjection",), CLIPTextConfigWithProjection, in_8_bits=True
)
IMAGE_ENCODER = ModelPart("image_encoder", ("CLIPVisionModelWithProjection",), CLIPVisionConfig)
QWEN3 = ModelPart("text_encoder", ("Qwen3Model", "Qwen3ForCausalLM"), Qwen3Config, in_8_bits=True)
TOKENIZER = TokenizerPart("tokenizer", ("CLIPTokenizer", "CLIPTokenizerFast"))
TOKENIZER_2 = TokenizerPart("tokenizer_2", TOKENIZER.classes)
CHAT_TOKENIZER = TokenizerPart("tokenizer", ("Qwen2Tokenizer", "Qwen2TokenizerFast"))
SCHEDULER = Part("scheduler")

# The names of our pipeline classes
LABELS, PROMPTS, TRAJECTORIES = "LabelPipeline", "TextToImagePipeline", "TrajectoryPipeline"
CAPTIONS = "ZImagePipeline"


@dataclass(frozen=True)
class PipelineClass:
    """A diffusers pipeline class: its parts, its defaults, and the fastdiff class that draws with it."""

    name: str
    denoisers: Mapping[DenoiserPart, str]  # possible denoisers -> the fastdiff pipeline for each
    companions: tuple[Part, ...] = ()  # parts beside the denoiser
    optional: tuple[Part, ...] = ()  # companions that may be null in model_index.json
    unused: tuple[str, ...] = ()  # parts that fastdiff does not run: pictures do not depend on them
    options: tuple[str, ...] = ()  # keys of model_index.json that are not parts
    scheduler: str | None = None  # the scheduler to use whatever the folder has
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)  # overrides for the folder's scheduler config
    guidance_scale: float | None = None  # the default; None without guidance
    guidance_scale_with_mask: float | None = None  # the default of inpainting; None: the same

    @property
    def denoiser(self) -> Part:
        """The denoiser's part, with the class names of all possible denoisers."""
        first, *_ = self.denoisers
        return Part(first.name, tuple(name for part in self.denoisers for name in part.classes))

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.denoiser, *self.companions, SCHEDULER)

    @property
    def reads_text(self) -> bool:
        """Whether the pipeline draws from prompts."""
        return any(isinstance(part, TokenizerPart) for part in self.companions)


_SD = PipelineClass(
    "StableDiffusionPipeline",
    {UNET_CONDITION: PROMPTS},
    (VAE, TEXT_ENCODER, TOKENIZER),
    unused=("safety_checker", "feature_extractor", "image_encoder"),
    options=("requires_safety_checker",),
    scheduler_options={"steps_offset": 1, "clip_sample": False},
    guidance_scale=7.5,
)
_SDXL = PipelineClass(
    "StableDiffusionXLPipeline",
    {UNET_CONDITION: PROMPTS},
    (VAE, TEXT_ENCODER, TEXT_ENCODER_2, TOKENIZER, TOKENIZER_2),
    optional=(TEXT_ENCODER, TEXT_ENCODER_2, TOKENIZER, TOKENIZER_2),
    unused=("image_encoder", "feature_extractor"),
    options=("force_zeros_for_empty_prompt", "add_watermarker"),
    guidance_scale=5.0,
    guidance_scale_with_mask=7.5,
)
_SCORED = ("requires_aesthetics_score", *_SDXL.options)

PIPELINES = {
    pipeline.name: pipeline
    for pipeline in (
        PipelineClass("DDIMPipeline", {UNET: LABELS, UNET_1D: TRAJECTORIES}, scheduler="ddim"),
        PipelineClass("DDPMPipeline", {UNET: LABELS, UNET_1D: TRAJECTORIES}),
        PipelineClass(
            "DiTPipeline",
            {TRANSFORMER: LABELS},
            (VAE,),
            optional=(VAE,),
            options=("id2label",),
            guidance_scale=4.0,
        ),
        *(
            PipelineClass(name, {Z_IMAGE: CAPTIONS}, (VAE, QWEN3, CHAT_TOKENIZER), guidance_scale=5.0)
            for name in ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline")
        ),
        PipelineClass("ValueGuidedRLPipeline", {UNET_1D: TRAJECTORIES}, (VALUE_FUNCTION,), options=("env",)),
        _SD,
        replace(
            _SD,
            name="StableDiffusionInpaintPipeline",
            scheduler_options={"steps_offset": 1, "skip_prk_steps": True},
        ),
        _SDXL,
        replace(_SDXL, name="StableDiffusionXLImg2ImgPipeline", options=_SCORED),  # SDXL's refiner
        replace(_SDXL, name="StableDiffusionXLInpaintPipeline", options=_SCORED, guidance_scale=7.5),
    )
}

CONTROLLED = {  # diffusers' pipelines with a ControlNet -> the pipelines of the same parts without it
    "StableDiffusionControlNetPipeline": "StableDiffusionPipeline",
    "StableDiffusionControlNetImg2ImgPipeline": "StableDiffusionPipeline",
    "StableDiffusionControlNetInpaintPipeline": "StableDiffusionInpaintPipeline",
    "StableDiffusionXLControlNetPipeline": "StableDiffusionXLPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline": "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLControlNetInpaintPipeline": "StableDiffusionXLInpaintPipeline",
}
PIPELINES |= {
    name: replace(
        PIPELINES[plain],
        name=name,
        companions=(*PIPELINES[plain].companions, CONTROLNET),
        scheduler_options={},
        guidance_scale=5.0 if "XL" in name else 7.5,
        guidance_scale_with_mask=None,
    )
    for name, plain in CONTROLLED.items()
}


def pipeline_class(name: str, *, controlled: bool) -> str:
    """Return the diffusers pipeline that draws as the pipeline `name` does, with or without a ControlNet."""
    if not controlled or name in CONTROLLED:
        return name if controlled else CONTROLLED.get(name, name)
    return next((other for other, plain in CONTROLLED.items() if plain == name), name)


def part_names() -> tuple[str, ...]:
    """Return the names of all parts that a pipeline may have."""
    return tuple(dict.fromkeys(part.name for pipeline in PIPELINES.values() for part in pipeline.parts))


def denoisers() -> tuple[DenoiserPart, ...]:
    """Return the parts that some pipeline calls at each step."""
    return tuple(dict.fromkeys(part for pipeline in PIPELINES.values() for part in pipeline.denoisers))


def denoiser_part(class_name: object) -> DenoiserPart | None:
    """Return the denoiser part of a diffusers class name, current or older; None if it is not a denoiser."""
    return next((part for part in denoisers() if class_name in part.classes), None)


def read_denoiser_part(path: Path) -> DenoiserPart:
    """Return the denoiser's part that a config.json names. Raises InputError if fastdiff draws with no such class."""
    check_draws(path.parent)
    class_name = read_json(path).get("_class_name")
    part = denoiser_part(class_name)
    if part is None:
        known = ", ".join(name for part in denoisers() for name in part.classes)
        raise InputError(f"{path}: model class {class_name!r} is not supported; fastdiff runs {known}")
    return part


def check_draws(folder: Path) -> None:
    """Raise InputError for the folder of a ControlNet, which draws nothing alone."""
    config = folder / "config.json"
    if (folder / "model_index.json").is_file() or not config.is_file():
        return
    if read_json(config).get("_class_name") in CONTROLNET.classes:
        raise InputError(
            f"{folder} is a ControlNet, which draws with a text model only; give that model, and this one as --control "
            "or controlnet="
        )


def read_model_index(folder: str | Path, without: Collection[str] = ()) -> dict[str, str]:
    """Return the class names in model_index.json: {"pipeline": ..., "scheduler": ..., "unet": ...}.

    A DiTPipeline has a `transformer` instead of a `unet`, and a `vae` unless it draws pixels (null in the file). Parts
    in `without` are left out and not checked.
    Raises InputError for a pipeline or model class that fastdiff does not run, and for code from outside diffusers
    and transformers (custom pipelines, classes of other modules).
    """
    path = Path(folder) / "model_index.json"
    check_draws(path.parent)
    index = read_json(path)
    name = index.get("_class_name")
    pipeline = PIPELINES.get(name) if isinstance(name, str) else None
    if pipeline is None:
        raise InputError(f"{path}: pipeline class {name!r} is not supported; fastdiff runs {', '.join(PIPELINES)}")
    known = {*(part.name for part in pipeline.parts), *pipeline.unused, *pipeline.options}
    extra = sorted(key for key in index.keys() - known if not key.startswith("_"))
    if extra:
        raise InputError(
            f"{path}: {', '.join(extra)} is not part of a {pipeline.name}; remove it or save the pipeline again"
        )
    wanted = [part for part in pipeline.parts if part.name not in without]
    there = [part for part in wanted if not (part in pipeline.optional and _is_null(index.get(part.name)))]
    return {"pipeline": pipeline.name} | {part.name: _part_class(path, part, index.get(part.name)) for part in there}


def control_folders(folder: Path) -> list[Path]:
    """Return the folders of a pipeline's ControlNets: `controlnet`, and of several also `controlnet_1` and so on."""
    found = [folder / CONTROLNET.name]
    while (folder / f"{CONTROLNET.name}_{len(found)}" / "config.json").is_file():
        found.append(folder / f"{CONTROLNET.name}_{len(found)}")
    return found


def check_one_controlnet(root: Path, name: str) -> None:
    """Raise InputError if a folder holds several ControlNets, or one in a folder of another name than `controlnet`.

    A folder that is a ControlNet itself may hold others.

    name: of the folder, in the error.
    """
    found = [] if (root / "config.json").is_file() else controlnets_below(root)
    if not found or found == [CONTROLNET.name]:
        return
    names = shortened(found)
    what = f"{len(found)} ControlNets" if len(found) > 1 else "a ControlNet in a folder"
    raise InputError(
        f"{name} holds {what}: {names}; give the folder of one, as in --control {name}:{found[0]}, or in Python "
        f"ControlNetModel.from_pretrained({name!r}, subfolder={found[0]!r})"
    )


def shortened(names: list[str]) -> str:
    """Return the first SHOWN names for a message, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def controlnets_below(root: Path) -> list[str]:
    """Return the names of the folders in `root` that hold a ControlNet, sorted."""
    return [path.parent.name for path in sorted(root.glob("*/config.json")) if controlnet_class(path.parent)]


def controlnet_class(folder: Path) -> str | None:
    """Return the class name of the ControlNet in a folder, also of a refused kind. None for anything else."""
    with contextlib.suppress(InputError):
        name = read_json(folder / "config.json").get("_class_name")
        return name if name in (CONTROLNET.class_name, *REFUSED_CLASSES) else None
    return None


def unused_parts(index: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts that fastdiff does not run, in a model_index.json that `read_model_index` accepts."""
    return tuple(name for name in PIPELINES[index["_class_name"]].unused if not _is_null(index.get(name)))


def _is_null(entry: object) -> bool:
    """Return whether an entry of model_index.json means that there is no such part."""
    return entry in (None, [None, None])


def _part_class(path: Path, part: Part, entry: object) -> str:
    """Return the class name in a [library, class] pair."""
    with naming(str(path)):
        library, class_name = checked(part.name, entry, ClassPair)
    if library != part.library:
        raise InputError(
            f"{path}: {part.name} is from {library!r}, not {part.library!r}; fastdiff never runs a model's code"
        )
    others = part.others if isinstance(part, ModelPart) else ()
    classes = [*part.classes, *(name for other in others for name in other.classes)]
    if classes and class_name not in classes:
        known = ", ".join(classes)
        raise InputError(f"{path}: {part.name} class {class_name} is not supported; fastdiff runs {known}")
    return class_name

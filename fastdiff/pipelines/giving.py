"""The parts and options that a caller of `Pipeline.from_pretrained` gives instead of the folder's, as in diffusers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdiff.arguments import shown
from fastdiff.checkpoints import loading
from fastdiff.checkpoints.hub import resolve_part
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import (
    CONTROLNET,
    IMAGE_ENCODER,
    SCHEDULER,
    control_folders,
    part_names,
    pipeline_class,
)
from fastdiff.checkpoints.single_files.controlnets import local_control_file
from fastdiff.checkpoints.single_files.reading import is_single_file
from fastdiff.errors import InputError
from fastdiff.models.classes import load_models
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.models.model import Model
from fastdiff.pipelines.parts import adopted
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked
from fastdiff.text.loading import load_tokenizer

REFUSED = loading.REFUSED | {  # options and parts of diffusers' pipelines that are refused, and why
    "safety_checker": "safety checkers are not run; give None",
    "add_watermarker": "pictures get no watermark; leave it out",
    "id2label": "give the names of the labels as `labels` in the folder's fastdiff.json",
    "env": "observations are not normalised here; leave it out",
}
REFUSED_FOR_FILES = REFUSED | {  # options of diffusers' `from_single_file` alone
    "original_config": "give the configs as a folder in diffusers' layout, with config=",
    "original_config_file": "give the configs as a folder in diffusers' layout, with config=",
    "local_files_only": "nothing is downloaded; leave it out",
}
TAKEN = ("feature_extractor", "requires_safety_checker")  # only safety checkers use them, which are not run
ZEROS = "force_zeros_for_empty_prompt"


@dataclass(frozen=True)
class Given:
    """The parts of fastdiff that replace the folder's, by name. None leaves a part out."""

    parts: Mapping[str, Any]
    zeros_for_no_prompt: bool | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any], refused: Mapping[str, str] = REFUSED) -> "Given":
        """Read the options of `from_pretrained` that are not named there. Raises InputError for one that is refused."""
        options = {name: value for name, value in options.items() if name not in TAKEN}
        names = (*part_names(), IMAGE_ENCODER.name)
        parts = {name: adopted(name, options[name]) for name in names if name in options}
        others = {name: value for name, value in options.items() if name not in (*parts, ZEROS)}
        loading.check_foreign(others, refused)
        for number in ("", "_2"):  # a tokenizer alone has no use
            if parts.get(f"text_encoder{number}", parts) is None:
                parts.setdefault(f"tokenizer{number}", None)
        return cls(parts, checked(ZEROS, options.get(ZEROS), bool | None))

    @property
    def configs(self) -> dict[str, Any]:
        """The configs of the parts for `ModelCard.read`."""
        return {name: getattr(part, "config", None) for name, part in self.parts.items()}

    def read_card(self, name: str, folder: Any) -> ModelCard:
        """Read a folder's card without the given parts. Raises as `checked`."""
        return self.checked(ModelCard.read(name, folder, self.configs))

    def checked(self, card: ModelCard) -> ModelCard:
        """Return a card that was read with `configs`. Raises InputError for parts that the pipeline does not have."""
        card = _with_controlnet(card) if self.parts.get(CONTROLNET.name) is not None else card
        known = {part.name for part in card.pipeline.parts}
        known |= {IMAGE_ENCODER.name} if card.pipeline.reads_text else set()
        for part, value in self.parts.items():
            if part not in known and value is not None:
                raise InputError(f"{part}: a {card.pipeline.name} has no such part; leave it out")
        if self.zeros_for_no_prompt is None:
            return card
        return replace(card, zeros_for_no_prompt=self.zeros_for_no_prompt and ZEROS in card.pipeline.options)

    def scheduler(self, changes: Mapping[str, Any]) -> Scheduler | None:
        """Return the given scheduler, changed as diffusers' pipeline class changes it, or None if none is given."""
        scheduler = self.parts.get(SCHEDULER.name)
        if scheduler is None:
            return None
        own = scheduler.config_class.names()
        changed = {name: value for name, value in changes.items() if name in own and scheduler.config[name] != value}
        return type(scheduler).from_config(scheduler.config, **changed) if changed else scheduler


NOTHING = Given({})


def load_parts(card: ModelCard, load: Load, given: Given = NOTHING) -> dict[str, Any]:
    """Load the models and tokenizers of a folder, except those that are given. Return all parts by name.

    Given models move to where the weights stay. Raises as `Model.from_folder` and `CLIPTokenizer`.
    """
    parts: dict[str, Any] = load_models(card, load, given.parts)
    if card.classes.get(CONTROLNET.name) == CONTROLNET.classes[1] and CONTROLNET.name in parts:
        parts[CONTROLNET.name] = tuple(_load_controlnet(load, folder) for folder in control_folders(card.folder))
    tokenizers = {part.name: load_tokenizer(part, card.folder) for part in card.tokenizers}
    ours = {name: _placed(part, load) for name, part in given.parts.items()}
    return {**parts, **tokenizers, **ours}


def _placed(part: Any, load: Load) -> Any:
    """Return a given part where the weights stay. A path is a ControlNet's folder, and a tuple has several of them."""
    if isinstance(part, tuple):
        return tuple(_placed(each, load) for each in part)
    if isinstance(part, str | Path) and is_single_file(part):
        return ControlNetModel.from_file(local_control_file(part), _load_of_controlnet(load), None, {}, ema=False)
    if isinstance(part, str | Path):
        return _load_controlnet(load, resolve_part(part, CONTROLNET, variant=load.variant))
    if isinstance(part, Model) and part.device != load.home:
        part.to(load.home)
    return part


def _load_controlnet(load: Load, folder: Path) -> ControlNetModel:
    return ControlNetModel.from_folder(folder, _load_of_controlnet(load))


def _load_of_controlnet(load: Load) -> Load:
    return load.of_part(CONTROLNET.name, in_8_bits=CONTROLNET.in_8_bits)


def _with_controlnet(card: ModelCard) -> ModelCard:
    """Return a pipeline's card as diffusers' pipeline with a ControlNet, which has its own default of guidance."""
    before = card.pipeline
    card = replace(card, classes={**card.classes, "pipeline": pipeline_class(before.name, controlled=True)})
    if card.info.guidance_scale != before.guidance_scale or card.pipeline.guidance_scale is None:
        return card
    return replace(card, info=replace(card.info, guidance_scale=card.pipeline.guidance_scale))


def read_scheduler(scheduler: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the name of a scheduler, or else the part that the caller gives instead of a name."""
    if scheduler is None or isinstance(scheduler, str):
        return scheduler, {}
    if isinstance(scheduler, type):
        raise InputError(f"scheduler: {shown(scheduler)} is a class; give an instance or a name")
    return None, {SCHEDULER.name: adopted(SCHEDULER.name, scheduler)}

"""Find the model class of a part, and load the models of a pipeline's folder."""

from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from fastdiff.checkpoints import hub, registry
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import ModelPart
from fastdiff.models import (
    autoencoder,
    autoencoder_tiny,
    clip,
    clip_vision,
    controlnet,
    dit,
    qwen3,
    unet1d,
    unet2d,
    unet2d_condition,
    z_image,
)
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import Model

AnyModel = TypeVar("AnyModel", bound=Model)

# Each adds its classes to Model.classes
MODULES = (
    *(autoencoder, autoencoder_tiny, clip, clip_vision, controlnet, dit, qwen3),
    *(unet1d, unet2d, unet2d_condition, z_image),
)


def model_class(part: ModelPart, kind: type[AnyModel]) -> type[AnyModel]:
    """Return the fastdiff class that runs a part. It must be a subclass of `kind`."""
    found = Model.classes[part.class_name]
    assert issubclass(found, kind)
    return found


# By diffusers' class name
DENOISERS: dict[str, type[Denoiser]] = {part.class_name: model_class(part, Denoiser) for part in registry.denoisers()}


def load_models(card: ModelCard, load: Load, without: Collection[str] = ()) -> dict[str, Model]:
    """Load the models of a pipeline's folder. Return them by part name. Raises as `Model.from_folder`.

    without: names of parts that are not loaded.
    """
    return {
        part.name: model_class(part, Model).from_folder(
            folder, load.of_part(part.name, in_8_bits=part.in_8_bits), inside=card.weights.get(part.name)
        )
        for part, folder in model_folders(card).items()
        if part.name not in without
    }


def model_folders(card: ModelCard) -> dict[ModelPart, Path]:
    """Return the folder of each model of a pipeline."""
    companions = [
        part.of_class(card.classes[part.name])
        for part in card.pipeline.companions
        if isinstance(part, ModelPart) and part.name in card.classes
    ]
    folders: dict[ModelPart, Path] = {card.denoiser: hub.component_folder(card.folder, card.denoiser.name)}
    return folders | {part: card.folder / part.name for part in companions}

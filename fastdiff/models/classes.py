"""Our class of each model that diffusers has, and the models of a pipeline's folder."""

from typing import Any, NamedTuple

import torch

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import VALUE_FUNCTION
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.clip import CLIPTextModel, CLIPTextModelWithProjection
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.dit import DiTTransformer2DModel
from fastdiff.models.model import Model
from fastdiff.models.unet1d import UNet1DModel
from fastdiff.models.unet2d import UNet2DModel
from fastdiff.models.unet2d_condition import UNet2DConditionModel

# By diffusers' class name, today's: the first of the classes of a part in fastdiff.checkpoints.registry.
DENOISERS: dict[str, type[Denoiser]] = {
    kind.__name__: kind for kind in (UNet2DModel, UNet1DModel, UNet2DConditionModel, DiTTransformer2DModel)
}

COMPANIONS: tuple[type[Model], ...] = (AutoencoderKL, CLIPTextModel, CLIPTextModelWithProjection)


class Models(NamedTuple):
    """The models of a pipeline's folder, None where it has no such."""

    denoiser: Denoiser
    vae: AutoencoderKL | None = None
    value_function: Denoiser | None = None
    text_encoder: CLIPTextModel | None = None
    text_encoder_2: CLIPTextModelWithProjection | None = None


def load_models(
    card: ModelCard, *, device: torch.device, dtype: torch.dtype, variant: str | None, precision: Precision
) -> Models:
    """Return the models of a pipeline's folder. Raises as `Model.from_folder`.

    precision: of the denoiser and the text encoders. A VAE is small, and everything passes through it: it stays whole,
    and so does a value function.
    """
    options: dict[str, Any] = {"variant": variant, "dtype": dtype, "device": device}
    kind = DENOISERS[card.denoiser.class_name]
    folder = hub.component_folder(card.folder, card.denoiser.name)
    denoiser = kind.from_folder(folder, **options, precision=precision)
    kinds: dict[str, type[Model]] = {VALUE_FUNCTION.name: kind} | {each.part.name: each for each in COMPANIONS}
    companions: dict[str, Any] = {
        name: kind.from_folder(
            card.folder / name, **options, precision=precision if issubclass(kind, CLIPTextModel) else "full"
        )
        for name, kind in kinds.items()
        if name in card.classes
    }
    return Models(denoiser, **companions)

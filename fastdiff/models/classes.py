"""Our class of each model that diffusers has, and the models of a pipeline's folder."""

from typing import Any

import torch

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import VALUE_FUNCTION
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.dit import DiTTransformer2DModel
from fastdiff.models.unet1d import UNet1DModel
from fastdiff.models.unet2d import UNet2DModel
from fastdiff.models.unet2d_condition import UNet2DConditionModel

# By diffusers' class name, today's: the first of the classes of a part in fastdiff.checkpoints.registry.
DENOISERS: dict[str, type[Denoiser]] = {
    kind.__name__: kind for kind in (UNet2DModel, UNet1DModel, UNet2DConditionModel, DiTTransformer2DModel)
}


def load_models(
    card: ModelCard, *, device: torch.device, dtype: torch.dtype, variant: str | None
) -> tuple[Denoiser, AutoencoderKL | None, Denoiser | None]:
    """Return the denoiser of a pipeline's folder, and its VAE and its value function where it has them."""
    options: dict[str, Any] = {"variant": variant, "dtype": dtype, "device": device}
    kind = DENOISERS[card.denoiser.class_name]
    denoiser = kind.from_folder(hub.component_folder(card.folder, card.denoiser.name), **options)
    vae = AutoencoderKL.from_folder(card.folder / AutoencoderKL.part.name, **options) if "vae" in card.classes else None
    has_values = VALUE_FUNCTION.name in card.classes
    return denoiser, vae, kind.from_folder(card.folder / VALUE_FUNCTION.name, **options) if has_values else None

"""Checks that the parts of a text-to-image pipeline fit together."""

from typing import Any

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.models.coding import Autoencoder
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.models.unet2d_condition import UNet2DConditionModel


def check_unet(unet: UNet2DConditionModel, vae: Autoencoder) -> None:
    """Raise InputError for a U-Net that needs more than a prompt."""
    channels = unet.config.state_channels
    if channels != vae.config.latent_channels and channels > unet.config.out_channels:
        raise InputError(
            f"unet: it has {channels} input channels, so it is for image editing; give a text-to-image model, which "
            f"has {vae.config.latent_channels}, or an inpainting model, which has "
            f"{2 * vae.config.latent_channels + 1}"
        )
    if unet.config.image_width is not None:
        raise InputError("unet: it reads image_embeds, which no prompt gives; call the model directly")
    if unet.config.takes_labels:
        raise InputError(
            "unet: it takes class labels and a prompt, as no diffusers pipeline does; call the model directly"
        )


def checked_nets(given: Any, unet: UNet2DConditionModel, scale: int) -> tuple[ControlNetModel, ...]:
    """Return the ControlNets of a pipeline: none for None, one, or the items of a list.

    scale: pixels for each latent.

    Raises InputError for anything else, and for a ControlNet that does not fit the U-Net.
    """
    nets = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    for net in nets:
        if not isinstance(net, ControlNetModel):
            raise InputError(f"controlnet: {shown(net)} has the wrong type; give a ControlNetModel, or a list of them")
        _check_fit(net, unet, scale)
    return nets


def _check_fit(net: ControlNetModel, unet: UNet2DConditionModel, scale: int) -> None:
    own, theirs = net.config, unet.config
    remedy = "give one that was trained for this model"
    for name, found, wanted in (
        ("cross_attention_dim", own.cross_attention_dim, theirs.text_width),
        ("in_channels", own.in_channels, theirs.state_channels),
        ("addition_embed_type", own.addition_embed_type, theirs.addition_embed_type),
        ("projection_class_embeddings_input_dim", own.encoder.added_shapes, theirs.added_shapes),
        ("block_out_channels, layers_per_block", own.encoder.residual_shapes(64, 64), theirs.residual_shapes(64, 64)),
    ):
        if found != wanted:
            differs = f" is {found}, and the U-Net needs {wanted}" if isinstance(found, int | str | None) else " differ"
            raise InputError(f"controlnet: its {name}{differs}; {remedy}")
    if own.takes_labels:
        raise InputError("controlnet: it takes class labels, which no prompt gives; call the model directly")
    if theirs.has_k_blocks or theirs.mid_stage is None:
        raise InputError("controlnet: this U-Net's blocks take no residuals of a ControlNet; leave it out")
    if own.condition_scale != scale:
        raise InputError(
            f"controlnet: it shrinks control pictures by {own.condition_scale}, and the VAE by {scale}; {remedy}"
        )

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
        net.config.check_fit(unet.config, scale)
    return nets

"""Conditions that pictures of prompts are drawn under, and what guidance leads them away from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.diffusion.conditions import Conditions, Guidance
from fastdiff.errors import InputError
from fastdiff.execution.transfers import upload
from fastdiff.models.blocks.conditioning import Prompt
from fastdiff.models.blocks.embeddings import Timesteps
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.pipelines.encoding import Encoded
from fastdiff.pipelines.prompts import Prompts

Told = tuple[Encoded, Tensor | None]  # a text, and the six numbers of SDXL


def make_conditions(
    prompts: Prompts,
    of_pictures: Sequence[int],
    scale: float,
    rescale: float,
    time_ids: tuple[Tensor, Tensor] | None,
    unet: UNet2DConditionModel,
    device: torch.device,
) -> Conditions:
    """Encode the prompts and return the conditions of pictures; those that are told the same share one.

    Args:
        of_pictures: the index of each picture's prompt.
        scale, rescale: of the guidance, see `conditions.Guidance`; a scale up to 1 is unguided.
        time_ids: of SDXL, what it is told beside the prompt and beside what guidance leads away from, (6,) each.
        device: where the U-Net works.

    Raises as `TextEncoders.encode`; InputError where the two halves have texts of two lengths.
    """
    ids, ids_away = time_ids or (None, None)
    encoded, is_told = prompts.encode(), unet.config.time_cond_proj_dim is not None
    halves: list[list[Told]] = [[(encoded[i], ids) for i in of_pictures]]
    if scale > 1 and not is_told:
        away = prompts.encode_negative(encoded)
        halves.insert(0, [(away[i], ids_away) for i in of_pictures])
    listed, places = _list([told for half in halves for told in half])
    *null, own = upload(places, device).split(len(of_pictures))
    guidance = Guidance(scale, null[0], rescale) if null else None
    prompt = _stack(listed, unet, device, scale if is_told else None)
    return Conditions(None, own, guidance, prompt)


def _list(told: Sequence[Told]) -> tuple[list[Told], list[int]]:
    """Return the different ones of what pictures are told, and the place of each in that list."""
    keys = [tuple(map(id, each)) for each in told]  # equal texts are one object
    different = dict(zip(keys, told, strict=True))
    order = list(different)
    return list(different.values()), [order.index(key) for key in keys]


def _stack(listed: Sequence[Told], unet: UNet2DConditionModel, device: torch.device, scale: float | None) -> Prompt:
    """Return what the U-Net is told, on `device`; `scale` is what one of LCM is told beside."""
    lengths = sorted({len(encoded.text) for encoded, _ in listed})
    if len(lengths) > 1:
        raise InputError(
            f"prompt_embeds, negative_prompt_embeds: texts of {lengths[0]} and of {lengths[1]} tokens; "
            "give both of one length"
        )
    text = torch.stack([encoded.text.to(device, unet.dtype) for encoded, _ in listed])
    added = [
        (encoded.pooled.to(device, unet.dtype), upload(ids, device))
        for encoded, ids in listed
        if encoded.pooled is not None and ids is not None
    ]
    cond = () if scale is None else (upload(_embedded_scale(scale, unet), device).expand(len(text), -1),)
    return Prompt(text, added=tuple(map(torch.stack, zip(*added, strict=True))), timestep_cond=cond)


def _embedded_scale(scale: float, unet: UNet2DConditionModel) -> Tensor:
    """Return the embedding (1, width) of a guidance scale, as LCM's get_guidance_scale_embedding in diffusers."""
    width = unet.config.time_cond_proj_dim
    assert width is not None
    waves = Timesteps(width, flip_sin_to_cos=False, freq_shift=1)
    return waves(torch.tensor([(scale - 1) * 1000])).to(unet.dtype)

"""The conditions of a text-to-image run: the encoded prompts, and the negative prompts for guidance."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.diffusion.conditions import Conditions, Guidance
from fastdiff.errors import InputError
from fastdiff.execution.transfers import upload
from fastdiff.kinds import Fraction
from fastdiff.models.blocks.conditioning import Given, Prompt
from fastdiff.models.blocks.embeddings import Timesteps
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.pipelines.image_prompts import NO_IMAGES, ImagePrompts
from fastdiff.pipelines.prompted import Group, groups_of
from fastdiff.pipelines.prompts import START, Moment, Prompts
from fastdiff.pipelines.remembering import Encoded
from fastdiff.schema import checked


class Guiding(NamedTuple):
    """How a run is guided; see `conditions.Guidance`."""

    scale: float  # 1 or less is unguided
    rescale: float = 0.0
    interval: tuple[float, float] = (0.0, 1.0)


# A prompt, the six size numbers of SDXL, and the keys and values of its image prompts
Told = tuple[Encoded, Tensor | None, tuple[Tensor, ...]]


def make_groups(
    prompts: Prompts,
    of_pictures: Sequence[int],
    guiding: Guiding,
    time_ids: tuple[Tensor, Tensor] | None,
    unet: UNet2DConditionModel,
    device: torch.device,
    steps: int,
    images: ImagePrompts = NO_IMAGES,
) -> list[Group]:
    """Encode the prompts of a run of `steps` model calls and return its groups, one unless prompts are weighted.

    `make_conditions` describes the other arguments and the errors.
    """
    counts = prompts.count_chunks(steps, guided=_has_two_halves(guiding, unet))

    def make(rows: list[int], step: int) -> Conditions:
        pictures = [of_pictures[row] for row in rows]
        given = prompts, pictures, guiding, time_ids, unet, device
        return make_conditions(*given, counts, Moment(step, steps), images.at(rows))

    def key(step: int) -> object:
        return prompts.texts_at(Moment(step, steps))

    return groups_of([counts[i] for i in of_pictures], steps if prompts.changes else 1, make, key)


def _has_two_halves(guiding: Guiding, unet: UNet2DConditionModel) -> bool:
    """Whether some step has an unconditional half. LCM's U-Net takes the guidance scale as an input instead."""
    start, stop = guiding.interval
    return guiding.scale > 1 and start < stop and unet.config.time_cond_proj_dim is None


def make_conditions(
    prompts: Prompts,
    of_pictures: Sequence[int],
    guiding: Guiding,
    time_ids: tuple[Tensor, Tensor] | None,
    unet: UNet2DConditionModel,
    device: torch.device,
    chunks: Sequence[int] = (),
    moment: Moment = START,
    images: ImagePrompts = NO_IMAGES,
) -> Conditions:
    """Encode the prompts and return the conditions of the pictures. Pictures with equal conditions share one.

    Args:
        of_pictures: the index of each picture's prompt.
        guiding: without any guided step, no negative prompt is encoded.
        time_ids: for SDXL, the size numbers of the conditional and of the unconditional half, (6,) each.
        device: the U-Net's device.
        chunks: the chunks of each prompt, where prompts are weighted.
        moment: the model call.
        images: the image prompts of the pictures.

    Raises as `TextEncoders.encode`, and InputError if the two halves have different lengths in tokens.
    """
    ids, ids_away = time_ids or (None, None)
    encoded, is_told = prompts.encode(chunks, moment), unet.config.time_cond_proj_dim is not None
    of_own, of_null = images.at(range(len(of_pictures)))
    halves: list[list[Told]] = [[(encoded[i], ids, image) for i, image in zip(of_pictures, of_own, strict=True)]]
    if _has_two_halves(guiding, unet):
        away = prompts.encode_negative(encoded, chunks, moment)
        halves.insert(0, [(away[i], ids_away, image) for i, image in zip(of_pictures, of_null, strict=True)])
    listed, places = _list([told for half in halves for told in half])
    *null, own = upload(places, device).split(len(of_pictures))
    guidance = Guidance(guiding.scale, null[0], guiding.rescale, guiding.interval) if null else None
    prompt = _stack(listed, unet, device, guiding.scale if is_told else None)
    return Conditions(None, own, guidance, prompt)


def _list(told: Sequence[Told]) -> tuple[list[Told], list[int]]:
    """Return the distinct entries of `told`, and for each entry its index among them."""
    keys = [tuple(map(id, each)) for each in told]  # `Prompts` returns one object for equal texts
    different = dict(zip(keys, told, strict=True))
    order = list(different)
    return list(different.values()), [order.index(key) for key in keys]


def _stack(listed: Sequence[Told], unet: UNet2DConditionModel, device: torch.device, scale: float | None) -> Prompt:
    """Return the U-Net's inputs for the distinct conditions, on `device`. `scale`: the guidance scale input of LCM."""
    lengths = sorted({len(encoded.text) for encoded, _, _ in listed})
    if len(lengths) > 1:
        raise InputError(
            f"prompt_embeds, negative_prompt_embeds: they have {lengths[0]} and {lengths[1]} tokens; "
            "give both the same length"
        )
    text = torch.stack([encoded.text.to(device, unet.dtype) for encoded, _, _ in listed])
    added = [
        (encoded.pooled.to(device, unet.dtype), upload(ids, device))
        for encoded, ids, _ in listed
        if encoded.pooled is not None and ids is not None
    ]
    cond = () if scale is None else (upload(_embedded_scale(scale, unet), device).expand(len(text), -1),)
    images = [images for _, _, images in listed]
    return Prompt(text, added=_stacked(added), timestep_cond=cond, images=_stacked(images))


def _stacked(rows: Sequence[tuple[Tensor, ...]]) -> Given:
    """Return each column of the rows as one tensor."""
    return tuple(map(torch.stack, zip(*rows, strict=True)))


def _embedded_scale(scale: float, unet: UNet2DConditionModel) -> Tensor:
    """Return the embedding (1, width) of a guidance scale, as diffusers' get_guidance_scale_embedding for LCM."""
    width = unet.config.time_cond_proj_dim
    assert width is not None
    waves = Timesteps(width, flip_sin_to_cos=False, freq_shift=1)
    return waves(torch.tensor([(scale - 1) * 1000])).to(unet.dtype)


def checked_interval(start: Any, stop: Any) -> tuple[float, float]:
    """Return the part of a run that is guided. Raises InputError for wrong fractions."""
    start, stop = checked("guidance_start", start, Fraction), checked("guidance_stop", stop, Fraction)
    if start > stop:
        raise InputError(f"guidance_stop: {stop} is before guidance_start, {start}; give a larger number")
    return start, stop

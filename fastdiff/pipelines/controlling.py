"""ControlNets in a text-to-image call: their arguments and pictures, and the steps at which they are on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Len
from torch import Tensor

from fastdiff.arguments import as_int
from fastdiff.diffusion.loop import Controlled
from fastdiff.diffusion.pictures import Subjects
from fastdiff.errors import InputError
from fastdiff.execution.transfers import upload
from fastdiff.kinds import MAX_LAYERS, Fraction
from fastdiff.models.controlled import ControlledUNet
from fastdiff.models.controlnet import ControlNetModel, Filters
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.pipelines.control_pictures import NAME, of_each_net, read_pictures
from fastdiff.pipelines.drawing import DrawingOptions, Start
from fastdiff.pipelines.image_to_image import ImageStart
from fastdiff.pipelines.inpainting import InpaintStart
from fastdiff.requests.defaults import control_scale_of
from fastdiff.schema import checked

MOST = MAX_LAYERS  # ControlNets

_Numbers: Any = float | Annotated[tuple[float, ...], Len(1, MOST)]
_Fractions: Any = Fraction | Annotated[tuple[Fraction, ...], Len(1, MOST)]


@dataclass(frozen=True)
class ControlOptions:
    """The arguments of a call for ControlNets, as in diffusers' StableDiffusionControlNetPipeline."""

    control_image: Any = None
    controlnet_conditioning_scale: float | Sequence[float] | None = None
    guess_mode: bool = False
    control_guidance_start: float | Sequence[float] = 0.0
    control_guidance_end: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {
            "guess_mode": bool,
            "controlnet_conditioning_scale": _Numbers | None,
            "control_guidance_start": _Fractions,
            "control_guidance_end": _Fractions,
        }
        for name, kind in kinds.items():
            object.__setattr__(self, name, checked(name, getattr(self, name), kind))

    def check_unused(self) -> None:
        """Raise InputError if an argument is given that only a pipeline with a ControlNet takes."""
        usual = ControlOptions()
        for name, value in vars(self).items():
            if value is not None and (name == NAME or value != getattr(usual, name)):
                raise InputError(f"{name}: this pipeline has no ControlNet; load it with controlnet=, or leave it out")

    def with_image(self, image: Any, others: Sequence[Any]) -> tuple["ControlOptions", Any]:
        """Return the options and the image to start from. An image alone, without any of `others`, is for control."""
        if self.control_image is None and all(each is None for each in others):
            return replace(self, control_image=image), None
        return self, image

    def read(self, nets: Sequence[ControlNetModel], *, masked: bool) -> "Controlling":
        """Return the checked arguments for a pipeline's ControlNets, without pictures. Raises InputError.

        masked: whether the call has a mask.
        """
        if self.control_image is None:
            raise InputError(f"{NAME}: this pipeline has a ControlNet, which reads a picture; give one")
        starts, ends = (
            _of_each(name, getattr(self, name), len(nets))
            for name in ("control_guidance_start", "control_guidance_end")
        )
        for start, end in zip(starts, ends, strict=True):
            if start >= end:
                raise InputError(f"control_guidance_end: {end} is not after control_guidance_start, {start}")
        scales = None
        if self.controlnet_conditioning_scale is not None:
            scales = _of_each("controlnet_conditioning_scale", self.controlnet_conditioning_scale, len(nets))
        # diffusers reads the first one's, and StableDiffusionXLControlNetInpaintPipeline none
        pooled = nets[0].config.global_pool_conditions and not (masked and _is_of_sdxl(nets))
        return Controlling(
            tuple(nets), of_each_net(self.control_image, len(nets)), self.guess_mode or pooled, starts, ends, scales
        )


def _is_of_sdxl(nets: Sequence[ControlNetModel]) -> bool:
    return nets[0].config.addition_embed_type == "text_time"


def _of_each(name: str, value: Any, count: int) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * count
    if len(values) != count:
        raise InputError(f"{name}: {len(values)} given for {count} ControlNets; give one number, or one for each")
    return tuple(map(float, values))


@dataclass(frozen=True)
class Controlling:
    """The ControlNets of a call, with checked arguments."""

    nets: tuple[ControlNetModel, ...]
    given: Sequence[Any]  # of each ControlNet: its pictures as the caller gave them
    guess: bool
    starts: tuple[float, ...]  # the share of the run at which each begins
    ends: tuple[float, ...]
    scales: tuple[float, ...] | None  # None: the default
    pictures: tuple[Tensor, ...] = ()  # (K, C, H, W) for each, once they are read

    def with_pictures(self, scale: int, asked: DrawingOptions, start: ImageStart | None) -> "Controlling":
        """Read the pictures, as large as a run draws them.

        Args:
            scale: pixels for each latent.
            asked: with the height and width of a run that starts from pictures.
            start: what the run starts from.
        """
        size: tuple[Any, Any] = asked.height, asked.width
        if asked.latents is not None and size == (None, None):
            size = scale * asked.latents.shape[-2], scale * asked.latents.shape[-1]
        crop = start.crop if isinstance(start, InpaintStart) else None
        return replace(self, pictures=read_pictures(self.given, self.nets, scale, size, crop))

    def again(self, start: ImageStart | None) -> dict[str, Any]:
        """Return the arguments of a call that goes on with the same control."""
        given = self.given[0] if len(self.nets) == 1 else list(self.given)
        return {NAME: given, "controlnet_conditioning_scale": self._scales(start)}

    def _scales(self, start: Start | None) -> tuple[float, ...]:
        if self.scales is not None:
            return self.scales
        masked = start is not None and start.masked
        return (control_scale_of(of_sdxl=_is_of_sdxl(self.nets), from_image=start is not None, masked=masked),) * len(
            self.nets
        )

    @property
    def size(self) -> tuple[int, int]:
        """The height and width of the pictures in pixels."""
        return self.pictures[0].shape[2], self.pictures[0].shape[3]

    def count(self, asked: DrawingOptions, subjects: Subjects) -> int | None:
        """Return the number of pictures that they ask for: if nothing else does, one for each of theirs.

        Of several prompts, each may have its own control picture.
        """
        most = max(map(len, self.pictures))
        if any(count is not None for count in asked.counts.values()) or len(subjects.each) > 1:
            return None
        per_subject = asked.seed if isinstance(asked.seed, list | tuple) else range(as_int(subjects.count) or 0)
        return most if most > len(per_subject) else None

    def run(
        self, unet: UNet2DConditionModel, of_pictures: Sequence[int], prompts: int, steps: int, start: Start | None
    ) -> "ControlRun":
        """Embed the pictures, and return the control of a run.

        Args:
            of_pictures: the index of each picture's prompt.
            prompts: their number.
            steps: model calls.
            start: what the run starts from.

        Raises InputError if the number of control pictures fits neither the prompts nor the pictures.
        """
        parts = []
        scales = self._scales(start)
        for i, (net, pictures) in enumerate(zip(self.nets, self.pictures, strict=True)):
            places = _places(len(pictures), of_pictures, prompts)
            _check_dtype(net, unet)
            filters = net.filters(net.scales(scales[i], guess=self.guess).to(net.device))
            each = pictures.permute(0, 2, 3, 1).to(net.device, net.dtype).split(1)
            embedded = torch.cat([net.embed_condition(picture) for picture in each])[upload(places, net.device)]
            parts.append(ControlPart(net, embedded, filters, scales[i], self.starts[i], self.ends[i]))
        return ControlRun(unet, parts, steps, conditional_alone=self.guess)


def _places(count: int, of_pictures: Sequence[int], prompts: int) -> list[int]:
    """Return the control picture of each picture: the only one, its prompt's, or its own."""
    if count == 1:
        return [0] * len(of_pictures)
    if count == len(of_pictures):
        return list(range(count))
    if count == prompts:
        return list(of_pictures)
    raise InputError(
        f"{NAME}: {count} given for {prompts} prompts and {len(of_pictures)} pictures; give one, or one for each prompt"
    )


class ControlPart(NamedTuple):
    """A ControlNet during a run."""

    net: ControlNetModel
    embedded: Tensor  # (N, h, w, C), of the control pictures
    filters: Filters
    scale: float
    start: float
    end: float

    def is_on(self, step: int, steps: int) -> bool:
        """Whether it counts at a step; the rule is diffusers'."""
        return self.scale != 0 and not (step / steps < self.start or (step + 1) / steps > self.end)


class ControlRun:
    """The ControlNets during a run. It is a `diffusion.loop.Control`."""

    def __init__(
        self, unet: UNet2DConditionModel, parts: Sequence[ControlPart], steps: int, *, conditional_alone: bool
    ):
        """conditional_alone: guess mode, in which the unconditional half is predicted without them."""
        self._unet, self._parts, self._steps = unet, parts, steps
        self._conditional_alone = conditional_alone
        self._made: dict[tuple[int, ...], Controlled] = {}  # by the ControlNets that are on

    def at(self, step: int) -> Controlled | None:
        on = tuple(i for i, part in enumerate(self._parts) if part.is_on(step, self._steps))
        if on and on not in self._made:
            parts = [self._parts[i] for i in on]
            self._made[on] = Controlled(
                ControlledUNet(self._unet, [part.net for part in parts]),
                tuple(part.embedded for part in parts),
                tuple(part.filters for part in parts),
                self._conditional_alone,
                (id(self._unet), *((part.net.place, part.scale) for part in parts)),
            )
        return self._made.get(on)

    def of_rows(self, rows: Sequence[int]) -> "ControlRun":
        """Return the control of some of the pictures."""
        parts = [part._replace(embedded=part.embedded[list(rows)]) for part in self._parts]
        return ControlRun(self._unet, parts, self._steps, conditional_alone=self._conditional_alone)


def _check_dtype(net: ControlNetModel, unet: UNet2DConditionModel) -> None:
    """Raise InputError unless a ControlNet has the U-Net's dtype and device."""
    if (net.dtype, net.device) != (unet.dtype, unet.device):
        raise InputError(
            f"controlnet: it is {net.dtype} on {net.device}, but the U-Net is {unet.dtype} on {unet.device}; "
            "move one of them with .to()"
        )

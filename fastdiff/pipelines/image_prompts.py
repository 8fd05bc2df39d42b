"""Image prompts: pictures that a text-to-image pipeline reads through IP-Adapters, as in diffusers' IPAdapterMixin.

The pictures of a call are encoded before its first step, up to the keys and values of all attentions, which do not
change from step to step. The scale of an adapter is in the values, so changing it builds no new CUDA graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.adapters.factors import ONE, Factor, factor
from fastdiff.arguments import optional, shown, text
from fastdiff.checkpoints.registry import IMAGE_ENCODER
from fastdiff.checkpoints.single_files.ip_adapter_sizes import check_encoder
from fastdiff.diffusion.decoding import check_finite
from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.execution.offloading import on_gpu
from fastdiff.execution.tensors import FLOATS, tensor
from fastdiff.kinds import Pictures
from fastdiff.models.clip_vision import CLIPVisionModelWithProjection
from fastdiff.models.ip_adapter import IPAdapter, build_ip_adapter
from fastdiff.models.ip_adapter_files import read_ip_adapter
from fastdiff.models.model import Model
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.pipelines.clip_images import CLIPImageProcessor
from fastdiff.pipelines.ip_places import ENCODER_FOLDER, ip_adapter_places
from fastdiff.pipelines.last_call import LastCall
from fastdiff.pipelines.parts import adopted
from fastdiff.requests.input_picture import ImagesOfEach
from fastdiff.schema import checked

_OF_HUB = {"cache_dir", "force_download", "local_files_only", "token", "revision"}
_UNUSED = {"low_cpu_mem_usage", "proxies"}  # arguments of diffusers' load_ip_adapter that change nothing here
_IMAGE, _EMBEDS = "ip_adapter_image", "ip_adapter_image_embeds"

Halves = tuple[Tensor, Tensor]  # (B, n, ...): of n pictures for the conditional half, and for the unconditional half


@dataclass(frozen=True)
class ImagePromptOptions:
    """The image prompts of a call, as in diffusers."""

    ip_adapter_image: Any = None
    ip_adapter_image_embeds: Any = None


class ImagePrompts(NamedTuple):
    """The keys and values of image prompts: (keys, width) for each IP-Adapter, one entry for all pictures or for each.

    Equal entries are one object.
    """

    own: Sequence[tuple[Tensor, ...]] = ((),)
    away: Sequence[tuple[Tensor, ...]] = ((),)  # of the unconditional half

    def at(self, rows: Sequence[int]) -> "ImagePrompts":
        """Return the entries of these pictures."""
        return ImagePrompts(*([half[row % len(half)] for row in rows] for half in self))


NO_IMAGES = ImagePrompts()


class LoadedIPAdapters(NamedTuple):
    """The IP-Adapters of a U-Net, with their scales."""

    unet: UNet2DConditionModel
    adapters: tuple[IPAdapter, ...]
    factors: tuple[Factor, ...]


class ImagePrompting(LastCall):
    """A pipeline that reads pictures through IP-Adapters."""

    feature_extractor: CLIPImageProcessor | None = None
    _image_encoder: CLIPVisionModelWithProjection | None = None
    _loaded: LoadedIPAdapters | None = None

    @property
    def image_encoder(self) -> CLIPVisionModelWithProjection | None:
        """The image encoder of IP-Adapters. It can be set to one of fastdiff, or to a live one of transformers."""
        return self._image_encoder

    @image_encoder.setter
    def image_encoder(self, encoder: Any) -> None:
        ours = adopted(IMAGE_ENCODER.name, encoder)
        if ours is not None and not isinstance(ours, CLIPVisionModelWithProjection):
            raise InputError(f"image_encoder: {shown(encoder)} is no CLIPVisionModelWithProjection; give one")
        if ours is not None:
            _check_encoder(ours, self._ip_adapters)
        self._image_encoder = self._at_home(ours)
        self.feature_extractor = None if ours is None else CLIPImageProcessor(ours.config.image_size)

    @property
    def models(self) -> tuple[Model, ...]:
        return (*super().models, *(() if self._image_encoder is None else (self._image_encoder,)))

    @property
    def _ip_adapters(self) -> tuple[IPAdapter, ...]:
        """The loaded IP-Adapters. Another U-Net has none, as in diffusers."""
        return () if self._loaded is None or self._loaded.unet is not self.denoiser else self._loaded.adapters

    def load_ip_adapter(
        self,
        pretrained_model_name_or_path_or_dict: Any,
        subfolder: str | Sequence[str] | None = None,
        weight_name: str | Sequence[str] | None = None,
        image_encoder_folder: str | None = ENCODER_FOLDER,
        **kwargs: Any,
    ) -> None:
        """Load one or several IP-Adapters, plain or plus, instead of all that were loaded before. Their scale is 1.

        Args:
            pretrained_model_name_or_path_or_dict: a safetensors or .bin file; a folder; a hub id, which downloads only
                what is needed; the dict that a file holds; or a list of them.
            subfolder: of the folder or on the hub, such as `models` or `sdxl_models`; one for all files, or a list.
            weight_name: the name of the file there; a list of names loads several adapters.
            image_encoder_folder: the folder of the image encoder, in `subfolder` or beside the file; a name with a `/`
                is from the root of the folder or hub model. It is only read if the pipeline has no image encoder yet.
                None loads none; calls then need `ip_adapter_image_embeds`.
            kwargs: the hub's `revision`, `token`, `cache_dir`, `local_files_only` and `force_download`.

        Raises:
            InputError: for a file that is no plain or plus IP-Adapter of this model, and for an image encoder that does
                not fit it. Nothing has changed then.
            NonFiniteWeightsError: for NaN or infinity in the weights.
        """
        unknown = sorted(kwargs.keys() - _UNUSED - _OF_HUB)
        if unknown:
            raise InputError(f"{unknown[0]}: load_ip_adapter has no such argument; leave it out")
        client = {name: value for name, value in kwargs.items() if name in _OF_HUB}
        optional(text, "image_encoder_folder", image_encoder_folder)
        places = ip_adapter_places(pretrained_model_name_or_path_or_dict, subfolder, weight_name)
        adapters = tuple(build_ip_adapter(read_ip_adapter(place.local(client)), self.denoiser) for place in places)
        encoder = self._image_encoder
        if encoder is None and image_encoder_folder is not None:
            encoder = places[0].load_encoder(image_encoder_folder, client, self.denoiser)
        if encoder is not None:
            _check_encoder(encoder, adapters)
        if encoder is not self._image_encoder:
            self.image_encoder = encoder
        self._loaded = LoadedIPAdapters(self.denoiser, adapters, (ONE,) * len(adapters))

    def set_ip_adapter_scale(self, scale: Any) -> None:
        """Set the scales of the loaded IP-Adapters.

        Args:
            scale: a number, or a dict of blocks such as `{"down": {"block_2": [0.0, 1.0]}, "up": {"block_0": [0.0, 1.0,
                0.0]}}`, for all adapters; or a list with one entry for each. What a dict leaves out gets 0.

        Raises InputError for anything else, for blocks that the U-Net does not have, and if no IP-Adapter is loaded.
        """
        adapters = self._there()
        given = list(scale) if isinstance(scale, list | tuple) else [scale] * len(adapters)
        if len(given) != len(adapters):
            raise InputError(f"scale: {len(given)} given for {len(adapters)} IP-Adapters; give one for each")
        factors = []
        for each in given:
            if each is None:
                raise InputError("scale: None is not a number; give one, such as 0.6")
            found = factor("scale", each, self.denoiser)
            factors.append(Factor(0.0, found.of_blocks) if isinstance(each, Mapping) else found)
        assert self._loaded is not None
        self._loaded = self._loaded._replace(factors=tuple(factors))

    def unload_ip_adapter(self) -> None:
        """Forget the IP-Adapters and the image encoder. Pictures then have the bits of the plain model."""
        self._loaded = None
        self.image_encoder = None

    def encode_image(
        self, image: Any, device: Any, num_images_per_prompt: int, output_hidden_states: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode pictures with the image encoder, as diffusers' pipelines do.

        Args:
            image: PIL images, arrays (H, W, 3) of bytes, or a tensor (n, 3, image_size, image_size), normalised.
            device: of the result.
            num_images_per_prompt: how often each picture is repeated.
            output_hidden_states: return the penultimate hidden states (n, L, C) instead of image_embeds (n, C).

        Returns:
            The embeddings of the pictures, and the embeddings for the unconditional half.

        Raises InputError for a picture that cannot be read, and NonFiniteError for NaN in the encoder's output.
        """
        count = checked("num_images_per_prompt", num_images_per_prompt, Pictures)
        states = bool(checked("output_hidden_states", output_hidden_states, bool | None))
        device = self.device if device is None else resolve_device(device)
        both = self._encoded("image", image, states=states)
        own, away = (each.repeat_interleave(count, dim=0).to(device) for each in both)
        return own, away

    def prepare_ip_adapter_image_embeds(
        self,
        ip_adapter_image: Any,
        ip_adapter_image_embeds: Any,
        device: Any,
        num_images_per_prompt: int,
        do_classifier_free_guidance: bool,
    ) -> list[Tensor]:
        """Return image prompts as `ip_adapter_image_embeds`, so that later calls need no image encoder.

        Args:
            ip_adapter_image: as in a call.
            ip_adapter_image_embeds: as in a call.
            device: of the result.
            num_images_per_prompt: rows for each half.
            do_classifier_free_guidance: whether to put the unconditional half before the conditional one.

        Returns:
            A tensor (rows, n, ...) for each IP-Adapter, of n pictures.

        Raises InputError for arguments that are wrong.
        """
        count = checked("num_images_per_prompt", num_images_per_prompt, Pictures)
        guided = checked("do_classifier_free_guidance", do_classifier_free_guidance, bool)
        device = self.device if device is None else resolve_device(device)
        options = ImagePromptOptions(ip_adapter_image, ip_adapter_image_embeds)
        halves = self._halves(options, guided=guided)
        if not halves:
            raise InputError(f"{_IMAGE}: missing; give a picture")
        parts = [[own] if not guided else [away, own] for own, away in halves]
        return [torch.cat([each.repeat(count, *[1] * (each.ndim - 1)) for each in pair]).to(device) for pair in parts]

    def _image_prompts(self, options: ImagePromptOptions, pictures: int) -> ImagePrompts:
        """Encode the image prompts of a call that draws so many pictures. Raises InputError for wrong arguments.

        With `ImagesOfEach` each image prompt is encoded once.
        """
        images = options.ip_adapter_image
        if isinstance(images, ImagesOfEach):
            known = {id(each): self._image_prompts(ImagePromptOptions(each), pictures) for each in images}
            return ImagePrompts(*([known[id(each)][half][0] for each in images] for half in (0, 1)))
        halves = self._halves(options, guided=self.do_classifier_free_guidance)
        if not halves:
            return NO_IMAGES
        assert self._loaded is not None
        for own, _ in halves:
            if len(own) not in (1, pictures):
                raise InputError(f"{_EMBEDS}: {len(own)} given for {pictures} pictures; give one, or one for each")
        count = max(len(own) for own, _ in halves)
        made: list[list[list[Tensor]]] = [[], []]  # for each half, adapter and entry
        with self._ip_adapters_at_work():
            for (own, away), adapter, scale in zip(halves, self._ip_adapters, self._loaded.factors, strict=True):
                for half, embeds in zip(made, (own, away), strict=True):
                    entries = [adapter.scaled(adapter.keys_and_values(each), scale.of) for each in embeds]
                    for entry in entries:
                        check_finite(entry, "IP-Adapter")
                    half.append(entries * (count // len(entries)))
        return ImagePrompts(*([*zip(*half, strict=True)] for half in made))

    def _halves(self, options: ImagePromptOptions, *, guided: bool) -> list[Halves]:
        """Return the embeddings of each IP-Adapter's pictures. [] without image prompts, and without IP-Adapters."""
        images, embeds = options.ip_adapter_image, options.ip_adapter_image_embeds
        if images is not None and embeds is not None:
            raise InputError(f"{_IMAGE}: {_EMBEDS} is also given; leave out one of the two")
        if images is None and embeds is None:
            if self._ip_adapters:
                raise InputError(f"{_IMAGE}: an IP-Adapter is loaded; give a picture, or call unload_ip_adapter first")
            return []
        adapters = self._there(_IMAGE if embeds is None else _EMBEDS)
        if embeds is not None:
            each = zip(_one_each(_EMBEDS, embeds, len(adapters)), adapters, strict=True)
            return [_given_halves(given, adapter, guided=guided) for given, adapter in each]
        given = _one_each(_IMAGE, images, len(adapters))
        if self._image_encoder is None:
            raise InputError(f"{_IMAGE}: there is no image encoder; set pipe.image_encoder, or give {_EMBEDS}")
        pairs = zip(given, adapters, strict=True)
        encoded = [self._encoded(_IMAGE, image, states=adapter.reads_states) for image, adapter in pairs]
        return [(own[None], away[None]) for own, away in encoded]

    def _encoded(self, name: str, image: Any, *, states: bool) -> tuple[Tensor, Tensor]:
        """Return the embeddings (n, ...) of pictures, and of the unconditional half."""
        encoder, processor = self._image_encoder, self.feature_extractor
        if encoder is None or processor is None:
            raise InputError("image_encoder: there is none; set pipe.image_encoder, or load an IP-Adapter with its own")
        pixels = image if isinstance(image, Tensor) else processor(image, name)
        size = encoder.config.image_size
        if isinstance(image, Tensor):
            tensor(name, image, FLOATS)
            if image.ndim != 4 or not len(image) or image.shape[1:] != (3, size, size):
                raise InputError(f"{name}: its shape is {tuple(image.shape)}; give (n, 3, {size}, {size}), normalised")
            if not image.isfinite().all():
                raise InputError(f"{name}: it has NaN or infinity; give finite numbers")
        with self._working(encoder):
            if not states:
                own = encoder(pixels).image_embeds
                away = torch.zeros_like(own)
            else:
                own = encoder.penultimate_states(pixels)
                away = encoder.penultimate_states(torch.zeros_like(pixels[:1])).expand_as(own)
        check_finite(own, "image encoder")
        return own, away

    def _there(self, argument: str = "scale") -> tuple[IPAdapter, ...]:
        if not self._ip_adapters:
            raise InputError(f"{argument}: no IP-Adapter is loaded; load one with load_ip_adapter first")
        return self._ip_adapters

    @contextmanager
    def _ip_adapters_at_work(self) -> Iterator[None]:
        """Keep the loaded IP-Adapters on the device, in the U-Net's dtype, during the block."""
        if self._gpu is None:
            for adapter in self._ip_adapters:
                adapter.to(self.device, self.dtype)
            yield
            return
        with on_gpu({adapter: lambda: None for adapter in self._ip_adapters}, self._gpu):
            yield


def _check_encoder(encoder: CLIPVisionModelWithProjection, adapters: Sequence[IPAdapter]) -> None:
    """Raise InputError if an image encoder does not give what IP-Adapters read."""
    for adapter in adapters:
        check_encoder(adapter.source, encoder.config, adapter.image_width, states=adapter.reads_states)


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """Return the entry of each IP-Adapter. As in diffusers, what is no list is the entry of the only one."""
    entries = list(given) if isinstance(given, list | tuple) else [given]
    if len(entries) != count:
        plural = "s" if count > 1 else ""
        raise InputError(f"{name}: {len(entries)} given for {count} IP-Adapter{plural}; give a list with one for each")
    return entries


def _given_halves(given: Any, adapter: IPAdapter, *, guided: bool) -> Halves:
    """Return both halves of given embeddings (rows, n, ...). Guided ones begin with the unconditional half."""
    tensor(_EMBEDS, given, FLOATS)
    shape = adapter.embeds_shape()
    fits = given.ndim == 2 + len(shape) and given.numel()
    if not fits or any(size not in (None, found) for size, found in zip(shape, given.shape[2:], strict=True)):
        wanted = ", ".join("L" if size is None else str(size) for size in shape)
        raise InputError(f"{_EMBEDS}: its shape is {tuple(given.shape)}; {adapter.source} reads (rows, n, {wanted})")
    if not given.isfinite().all():
        raise InputError(f"{_EMBEDS}: it has NaN or infinity; give finite numbers")
    given = given.detach()
    if not guided:
        return given, given
    if len(given) % 2:
        raise InputError(
            f"{_EMBEDS}: {len(given)} rows; a guided call reads the unconditional half before the conditional one; "
            "give both"
        )
    away, own = given.chunk(2)
    return own, away

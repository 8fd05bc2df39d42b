"""Parts: the models and the scheduler of a pipeline, their device, offloading and decoding."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.arguments import instance, optional, shown, text
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import CHAT_TOKENIZER, CONTROLNET, SCHEDULER, TOKENIZER, TOKENIZER_2, VAE
from fastdiff.diffusion.decoding import LATENT, OutputType, begin_decode, begin_latents, check_channels
from fastdiff.diffusion.latent_colors import FLUX, flux_colors
from fastdiff.diffusion.pictures import check_state
from fastdiff.errors import InputError
from fastdiff.execution.devices import check_move
from fastdiff.execution.offloading import on_gpu, rest_on_host
from fastdiff.models.classes import DENOISERS
from fastdiff.models.coding import Autoencoder
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.live import model_like
from fastdiff.models.model import Model
from fastdiff.samplers.shared.from_config import name_of, scheduler_like
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked
from fastdiff.text.chat_tokenizer import ChatTokenizer
from fastdiff.text.loading import Tokenizer
from fastdiff.text.tokenizer import CLIPTokenizer

AnyParts = TypeVar("AnyParts", bound="Parts")

VAE_KINDS = "an AutoencoderKL or AutoencoderTiny of fastdiff"
PREVIEW_SIDE = 32  # a preview averages larger latents down to about this side, so that it decodes quickly


def _part(name: str) -> property:
    """Return the property of a part. A pipeline that cannot have the part has no such attribute, as in diffusers."""

    def get(self: "Parts") -> Any:
        if name in self.components or name in self.optional_parts:
            return self.components.get(name)
        raise AttributeError(f"this {type(self).__name__} has no {name}")

    def set(self: "Parts", value: Any) -> None:
        self.__dict__.update(vars(self.with_parts(**{name: value})))

    return property(get, set, doc=f"The {name}. It can be set to one of fastdiff, or to a live one of diffusers.")


def adopted(name: str, value: Any) -> Any:
    """Return a part as one of fastdiff's: ours and None unchanged, a live one of diffusers or transformers converted.

    Raises InputError that begins with `name` for anything else.
    """
    if value is None or isinstance(value, Model | Tokenizer | Scheduler):
        return value
    if name == SCHEDULER.name:
        return scheduler_like(value)
    if name == CONTROLNET.name and isinstance(value, str | Path):  # `from_pretrained` loads it
        return value
    several = getattr(value, "nets", value) if name == CONTROLNET.name else None  # of diffusers' MultiControlNetModel
    if isinstance(several, list | tuple | nn.ModuleList):
        found = tuple(adopted(name, each) for each in several)
        if None in found:
            raise InputError(f"{name}: a list of ControlNets has None; give a ControlNetModel")
        return found[0] if len(found) == 1 else found or None
    if isinstance(value, nn.Module):
        return model_like(value, name)
    if name in (TOKENIZER.name, TOKENIZER_2.name):
        kind = ChatTokenizer if type(value).__name__ in CHAT_TOKENIZER.classes else CLIPTokenizer
        return kind.like(value, name)
    raise InputError(f"{name}: {shown(value)} has the wrong type; give a model of fastdiff or of diffusers")


class Parts:
    """A denoiser, its scheduler, and a VAE if the denoiser works on latents. A subclass may have more parts."""

    unet, transformer, value_function = _part("unet"), _part("transformer"), _part("value_function")
    text_encoder, text_encoder_2 = _part("text_encoder"), _part("text_encoder_2")
    tokenizer, tokenizer_2 = _part("tokenizer"), _part("tokenizer_2")
    controlnet = _part("controlnet")
    vae = _part("vae")

    _gpu: torch.device | None = None  # the GPU that the models run on, if the pipeline is offloaded

    optional_parts: ClassVar[tuple[str, ...]] = (VAE.name,)  # parts that may be None
    reads_text: ClassVar[bool] = False  # whether the pipeline takes prompts
    returns_latents: ClassVar[bool] = False  # whether the output type `latent` returns what the VAE would decode

    latents_of_flux: ClassVar[bool] = False  # whether latents of 16 channels are of Flux's VAE

    def __init__(self, denoiser: Denoiser, scheduler: Any, info: ModelInfo | None, name: str, vae: Autoencoder | None):
        instance("denoiser", denoiser, Denoiser, f"a {' or '.join(DENOISERS)} of fastdiff")
        optional(instance, "info", info, ModelInfo, "a ModelInfo")
        text("name", name)
        optional(instance, "vae", vae, Autoencoder, VAE_KINDS)
        if vae is not None and vae.config.latent_channels != denoiser.config.state_channels:
            raise InputError(
                f"vae: it decodes {vae.config.latent_channels} channels, and the model denoises "
                f"{denoiser.config.state_channels}; give the VAE that the model was trained with"
            )
        self.denoiser, self.name, self._vae = denoiser, name, vae
        self.info = info or ModelInfo(null_label=denoiser.config.null_label)
        self.scheduler = scheduler
        self._preview_vae: Autoencoder | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler. It can be set to one of fastdiff, or to one of diffusers, whose class and config are used."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._scheduler = scheduler if isinstance(scheduler, Scheduler) else scheduler_like(scheduler)

    @property
    def preview_vae(self) -> Autoencoder | None:
        """The VAE that decodes previews, such as an AutoencoderTiny. With None, the pipeline's own VAE does.

        For Z-Image a linear map, which is approximate, does it instead of its own VAE.

        Setting it moves it to the pipeline's device. Raises InputError for a VAE of other latents, and in a pipeline
        that has no VAE.
        """
        return self._preview_vae

    @preview_vae.setter
    def preview_vae(self, vae: Autoencoder | None) -> None:
        optional(instance, "preview_vae", vae, Autoencoder, VAE_KINDS)
        if vae is not None:
            found = None if self._vae is None else self._vae.config.latent_channels
            if found != vae.config.latent_channels:
                has = "draws pixels, without a VAE" if found is None else f"has latents of {found} channels"
                raise InputError(
                    f"preview_vae: it decodes {vae.config.latent_channels} channels, but this pipeline {has}; "
                    "give one that was trained for these latents"
                )
            check_channels(vae.config.out_channels, "pil")
            if self._gpu is None:
                vae.to(self.device)
            else:
                rest_on_host(vae.to("cpu"))
        self._preview_vae = vae

    def with_scheduler(self: AnyParts, scheduler: Any) -> AnyParts:
        """Return a pipeline with the same models and another scheduler, of fastdiff or of diffusers."""
        other = copy.copy(self)
        other.scheduler = scheduler
        return other

    @property
    def components(self) -> dict[str, Any]:
        """The models, tokenizers and scheduler of the pipeline, by name."""
        vae = {} if self._vae is None else {VAE.name: self._vae}
        return {**vae, self.denoiser.part.name: self.denoiser, SCHEDULER.name: self.scheduler}

    def with_parts(self: AnyParts, **parts: Any) -> AnyParts:
        """Return a pipeline with some parts replaced, and all other parts shared.

        Args:
            parts: the new parts by name, such as `vae` and `scheduler`: objects of fastdiff, or live ones of diffusers
                and transformers, which are copied. Models move to the device of the pipeline and keep their dtype.

        Raises InputError for parts that the pipeline does not have, and for parts that do not match.
        """
        unknown = [name for name in parts if name not in {*self.components, *self.optional_parts}]
        if unknown:
            raise InputError(f"{unknown[0]}: a {type(self).__name__} has no such part; leave it out")
        ours = {name: self._at_home(adopted(name, part)) for name, part in parts.items()}
        other = copy.copy(self)
        type(self).__init__(other, **self._arguments(self.components | ours))
        return other

    def _arguments(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the constructor for a pipeline of these parts."""
        denoiser = parts[self.denoiser.part.name]
        own = {"info": self.info, "name": self.name, "vae": parts.get(VAE.name)}
        return {"denoiser": denoiser, "scheduler": parts[SCHEDULER.name], **own}

    def _at_home(self, part: Any) -> Any:
        """Move a part that is a model, or a tuple of models, to where the pipeline keeps its models."""
        if isinstance(part, tuple):
            return tuple(map(self._at_home, part))
        if isinstance(part, Model) and part.device != self.denoiser.device:
            part.to(self.denoiser.device)
        if isinstance(part, Model) and self._gpu is not None:
            rest_on_host(part)
        return part

    @property
    def scheduler_name(self) -> str:
        """The scheduler's name in requests, such as ddim, ddpm or euler-karras."""
        return name_of(self.scheduler)

    @property
    def is_offloaded(self) -> bool:
        """Whether models move to the GPU only while they run."""
        return self._gpu is not None

    @property
    def device(self) -> torch.device:
        """The device that the models run on. An offloaded pipeline returns its GPU."""
        return self._gpu or self.denoiser.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the denoiser."""
        return self.denoiser.dtype

    @property
    def models(self) -> tuple[Model, ...]:
        """The parts of the pipeline that have weights."""
        return tuple(each for each in (self.denoiser, self._vae, self.preview_vae) if each is not None)

    def to(self: AnyParts, *args: Any, **kwargs: Any) -> AnyParts:
        """Move the models to a device or dtype, and return the pipeline itself.

        Args:
            args: a device, a dtype, or a device and a dtype, as in diffusers.
            kwargs: `device` and `dtype`, also by their older names `torch_device` and `torch_dtype`.
                `silence_dtype_warnings` has no effect, as there are no such warnings.

        Raises InputError if the models cannot be moved there, or if the pipeline is offloaded.
        """
        kwargs.pop("silence_dtype_warnings", None)
        for name in ("device", "dtype"):
            kwargs |= {name: kwargs.pop(f"torch_{name}")} if f"torch_{name}" in kwargs else {}
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        check_move(*args, **kwargs)
        if self._gpu is not None:
            raise InputError("to: an offloaded pipeline moves its own parts; load it without offload to move it")
        for model in self.models:
            model.to(*args, **kwargs)
        return self

    def offloaded_from(self: AnyParts, gpu: torch.device) -> AnyParts:
        """Keep the models, which are on the CPU, there, and move each to `gpu` only while it runs. Return `self`."""
        for model in self.models:
            rest_on_host(model)
        self._gpu = gpu
        return self

    @contextmanager
    def _working(self, *models: Model | None) -> Iterator[None]:
        """Keep the models on the GPU during the block. It does nothing if the pipeline is not offloaded."""
        if self._gpu is None:
            yield
            return
        there = {model: model.weights_state for model in models if model is not None}
        with on_gpu({model: model.release_graphs for model in there}, self._gpu):
            yield
        for model, state in there.items():
            if model.merging is not None and model.weights_state != state:  # the host's weights are from before
                model.merging.write_again()

    def _release_graphs(self) -> None:
        for model in self.models:
            model.release_graphs()

    @property
    def scale(self) -> int:
        """The number of pixels, in height and in width, for each position of the denoiser's input."""
        return 1 if self._vae is None else self._vae.config.scale

    def decode(self, x: Tensor, output_type: str) -> Any:
        """Decode the denoiser's result, (N, H, W, C) float32, to pictures, as `decoding.decode` does.

        Raises InputError for an `x` of another shape or dtype.
        """
        return self._begin_decode(check_state(x, self.denoiser.config), self._output_type(output_type))()

    def _begin_decode(self, x: Tensor, output_type: str) -> Callable[[], Any]:
        """Start to decode `x`, which is checked. Return a function that waits for the GPU and returns the pictures."""
        if output_type == LATENT:
            return begin_latents(x)
        with self._working(self._vae):
            return begin_decode(self._for_vae(x), output_type, self._vae)

    def _for_vae(self, x: Tensor) -> Tensor:
        """Return the denoiser's result (N, H, W, C) as `begin_decode` takes it."""
        return x

    @property
    def _has_drafts(self) -> bool:
        """Whether something cheaper than the pipeline's own VAE decodes previews."""
        is_mapped = self.latents_of_flux and self.denoiser.config.state_channels == len(FLUX)
        return is_mapped or self.preview_vae is not None

    def _begin_draft(self, x0: Tensor, output_type: str) -> Callable[[], Any]:
        """Start to decode x0 for a preview, as `_begin_decode` does."""
        if self.preview_vae is None:
            return begin_decode(flux_colors(x0), output_type)
        with self._working(self.preview_vae):
            return begin_decode(x0, output_type, self.preview_vae)

    def _small(self, x0: Tensor) -> Tensor:
        """Return x0 (N, H, W, C) for a preview. Average large latents, which take longer to decode than a step."""
        factor = 1 if self._vae is None else max(1, min(x0.shape[1:3]) // PREVIEW_SIDE)
        return x0 if factor == 1 else F.avg_pool2d(x0.permute(0, 3, 1, 2), factor).permute(0, 2, 3, 1)

    def _output_type(self, output_type: Any) -> str:
        """Return the checked output type; None is "pil". Raises InputError for a type that the pipeline lacks."""
        kinds = Literal[OutputType, "latent"] if self.returns_latents else OutputType
        output_type = checked("output_type", "pil" if output_type is None else output_type, kinds)
        if output_type != LATENT:
            check_channels(self._channels, output_type)
        return output_type

    @property
    def _channels(self) -> int:
        """The number of channels in a picture."""
        return self.denoiser.config.state_channels if self._vae is None else self._vae.config.out_channels

"""Parts, what a pipeline is made of: its models, where they work, and what they decode."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.arguments import instance, optional, text
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.decoding import OutputType, begin_decode, check_channels
from fastdiff.diffusion.pictures import check_state
from fastdiff.errors import InputError
from fastdiff.execution.devices import check_move
from fastdiff.execution.offloading import on_gpu, rest_on_host
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import DENOISERS
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import Model
from fastdiff.samplers.shared.from_config import name_of, scheduler_like
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked

AnyParts = TypeVar("AnyParts", bound="Parts")

PREVIEW_SIDE = 32  # previews average larger latents down to about this side, so that decoding costs little


class Parts:
    """A denoiser, its scheduler, and a VAE where the denoiser makes latents; a subclass may have more."""

    reads_text: ClassVar[bool] = False  # whether it draws from prompts

    def __init__(
        self, denoiser: Denoiser, scheduler: Any, info: ModelInfo | None, name: str, vae: AutoencoderKL | None
    ):
        instance("denoiser", denoiser, Denoiser, f"a {' or '.join(DENOISERS)} of fastdiff")
        optional(instance, "info", info, ModelInfo, "a ModelInfo")
        text("name", name)
        optional(instance, "vae", vae, AutoencoderKL, "an AutoencoderKL of fastdiff")
        if vae is not None and vae.config.latent_channels != denoiser.config.in_channels:
            raise InputError(
                f"vae: it decodes {vae.config.latent_channels} channels and the model denoises "
                f"{denoiser.config.in_channels}; give the VAE that the model was trained with"
            )
        self.denoiser, self.name, self.vae = denoiser, name, vae
        self.info = info or ModelInfo(null_label=denoiser.config.null_label)
        self.scheduler = scheduler
        self._gpu: torch.device | None = None  # where the models work, if they do not stay there

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        """One of ours, or diffusers' class of the same name, whose config is taken over."""
        self._scheduler = scheduler if isinstance(scheduler, Scheduler) else scheduler_like(scheduler)

    def with_scheduler(self: AnyParts, scheduler: Any) -> AnyParts:
        """Return a pipeline of the same models with a scheduler of its own."""
        other = copy.copy(self)
        other.scheduler = scheduler
        return other

    @property
    def scheduler_name(self) -> str:
        """The scheduler's name in requests: ddim, ddpm, euler-karras."""
        return name_of(self.scheduler)

    @property
    def device(self) -> torch.device:
        """Where the models work."""
        return self._gpu or self.denoiser.device

    @property
    def dtype(self) -> torch.dtype:
        return self.denoiser.dtype

    @property
    def models(self) -> tuple[Model, ...]:
        """The parts with weights."""
        return (self.denoiser, *(() if self.vae is None else (self.vae,)))

    def to(self: AnyParts, *args: Any, **kwargs: Any) -> AnyParts:
        """Move the models to a device or dtype, as torch's Module.to does. InputError where they cannot go there."""
        check_move(*args, **kwargs)
        if self._gpu is not None:
            raise InputError("to: an offloaded pipeline moves its parts itself; load it without offload to move it")
        for model in self.models:
            model.to(*args, **kwargs)
        return self

    def offloaded_from(self: AnyParts, gpu: torch.device) -> AnyParts:
        """Let the models, which are on the CPU, be on this GPU only while they work. Returns the pipeline itself."""
        for model in self.models:
            rest_on_host(model)
        self._gpu = gpu
        return self

    def _working(self, *models: Model | None) -> AbstractContextManager[None]:
        """Have models where they work during a block; nothing is done for those that stay there."""
        if self._gpu is None:
            return nullcontext()
        return on_gpu({model: model.release_graphs for model in models if model is not None}, self._gpu)

    def _release_graphs(self) -> None:
        for model in self.models:
            model.release_graphs()

    @property
    def scale(self) -> int:
        """Pixels of a picture for one of the denoiser's, in height and in width."""
        return 1 if self.vae is None else self.vae.config.scale

    def decode(self, x: Tensor, output_type: str) -> Any:
        """Return what the denoiser ends with, (N, H, W, C) float32, as pictures; see `decoding.decode`.

        InputError where `x` is no such.
        """
        return self._begin_decode(check_state(x, self.denoiser.config), self._output_type(output_type))()

    def _begin_decode(self, x: Tensor, output_type: str) -> Callable[[], Any]:
        """Begin `decode` of what was checked; the function that is returned waits for the GPU."""
        with self._working(self.vae):
            return begin_decode(x, output_type, self.vae)

    def _small(self, x0: Tensor) -> Tensor:
        """Return x0 (N, H, W, C) for a preview: large latents averaged, as decoding those takes longer than a step."""
        factor = 1 if self.vae is None else max(1, min(x0.shape[1:3]) // PREVIEW_SIDE)
        return x0 if factor == 1 else F.avg_pool2d(x0.permute(0, 3, 1, 2), factor).permute(0, 2, 3, 1)

    def _output_type(self, output_type: Any) -> str:
        """Return one that it has; for None the first. Raises InputError for any other."""
        output_type = checked("output_type", "pil" if output_type is None else output_type, OutputType)
        check_channels(self._channels, output_type)
        return output_type

    @property
    def _channels(self) -> int:
        """The number of channels of a picture."""
        return self.denoiser.config.sample_channels if self.vae is None else self.vae.config.out_channels

"""Pipeline: seeds and labels in, pictures out. Starting noise, one pass over the schedule's rows, decoding."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Generator, Tensor, nn

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.configs.autoencoder import autoencoder_scale
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.conditioning import Guidance, Table
from fastdiff.diffusion.loop import denoise
from fastdiff.diffusion.pictures import OUTPUT_TYPES, Label, decode, list_pictures
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers import DDIMScheduler, Scheduler, randn_tensor, scheduler_from_config
from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device, resolve_dtype
from fastdiff.models.autoencoder import decode_latents, load_autoencoder
from fastdiff.models.classes import DENOISERS
from fastdiff.models.denoiser import Denoiser


class PipelineOutput(NamedTuple):
    """images: PIL images, or (N, H, W, C) numpy or (N, C, H, W) torch float32 in [0, 1], as `output_type` asks."""

    images: Any


@dataclass(frozen=True)
class Step:
    """What `Pipeline.stream` yields after each step."""

    index: int  # 0 to num_steps - 1
    num_steps: int
    timestep: int
    images: Any  # the finished pictures after the last step, else None
    x_t: Tensor  # (N, H, W, C) float32, the state after the step; latents where the pipeline has a VAE
    x0: Tensor  # (N, H, W, C) float32, the end of it as the model predicts it now
    decoder: Callable[[Tensor, str], Any] = decode  # of x_t or x0, and an output type

    def preview(self) -> list[Image.Image]:
        """The finished pictures as the model predicts them now: a preview that sharpens step by step."""
        return self.decoder(self.x0, "pil")


class Pipeline:
    """A denoiser, its scheduler and its labels: draws as diffusers' DDPMPipeline, DDIMPipeline and DiTPipeline do.

    Beyond those it guides class-conditional models that have a null label, and the picture of a seed has the same
    bits alone, in any batch and at any place in it (given `seed`; a `generator` draws as diffusers does).
    """

    def __init__(
        self,
        denoiser: Denoiser,
        scheduler: Any,
        info: ModelInfo | None = None,
        name: str = "model",
        vae: nn.Module | None = None,
    ):
        """`vae`: diffusers' AutoencoderKL, for a denoiser of latents. InputError where the two do not fit together."""
        if vae is not None and vae.config.latent_channels != denoiser.config.in_channels:
            raise InputError(
                f"vae: it decodes {vae.config.latent_channels} channels and the model denoises "
                f"{denoiser.config.in_channels}; give the VAE that the model was trained with"
            )
        self.denoiser, self.name, self.vae = denoiser, name, vae
        self.info = info or ModelInfo(null_label=denoiser.config.null_label)
        self.scheduler = scheduler

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        scheduler: str | None = None,
        variant: str | None = None,
        **hub_options,
    ) -> "Pipeline":
        """A bundled name, a pipeline folder that diffusers saved, or a hub id.

        Args:
            device: auto takes a GPU where there is one.
            dtype: auto is float32 on the CPU and bfloat16 on a GPU.
            scheduler: ddim or ddpm, made from the folder's scheduler config. Default: what the folder says.
            variant: of the weights' files, such as fp16.
            hub_options: `revision`, `token`, `local_files_only`.

        Raises InputError for whatever cannot be loaded, NonFiniteError for NaN in the weights.
        """
        device = resolve_device(device)  # before anything is downloaded for it
        folder = hub.resolve(name_or_path, variant=variant, **hub_options)
        if not (folder / "model_index.json").is_file():
            raise InputError(f"{folder} has no model_index.json; a pipeline folder also holds the model's scheduler")
        card = ModelCard.read(str(name_or_path), folder)
        return cls.from_card(card, device=device, dtype=dtype, scheduler=scheduler, variant=variant)

    @classmethod
    def from_card(
        cls,
        card: ModelCard,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        scheduler: str | None = None,
        variant: str | None = None,
    ) -> "Pipeline":
        """The pipeline of a model folder that was found and whose configs were read. As `from_pretrained` otherwise."""
        device = resolve_device(device)
        dtype = resolve_dtype(dtype, device)
        folder = hub.component_folder(card.folder, card.denoiser.name)
        kind = DENOISERS[card.denoiser.class_name]
        denoiser = kind.from_folder(folder, variant=variant, dtype=dtype, device=device)
        vae = None
        if "vae" in card.classes:
            vae = load_autoencoder(card.folder / "vae", variant=variant, dtype=dtype, device=device)
        config = read_json(hub.component_folder(card.folder, "scheduler") / "scheduler_config.json")
        scheduler = scheduler or card.info.scheduler or card.scheduler
        return cls(denoiser, scheduler_from_config(config, scheduler), card.info, card.name, vae)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        """Ours, or diffusers' DDPMScheduler or DDIMScheduler, whose config is taken over."""
        if not isinstance(scheduler, Scheduler):
            config = getattr(scheduler, "config", None)
            if config is None:
                raise InputError(
                    f"scheduler: {type(scheduler).__name__} is none; give a DDIMScheduler or DDPMScheduler"
                )
            scheduler = scheduler_from_config({**config, "_class_name": type(scheduler).__name__})
        self._scheduler = scheduler

    @property
    def device(self) -> torch.device:
        return self.denoiser.device

    @property
    def dtype(self) -> torch.dtype:
        return self.denoiser.dtype

    def to(self, *args, **kwargs) -> "Pipeline":
        """Move the models to a device or dtype, as torch's Module.to does."""
        self.denoiser.to(*args, **kwargs)
        if self.vae is not None:
            self.vae.to(*args, **kwargs)
        return self

    @property
    def scale(self) -> int:
        """Pixels of a picture for one of the denoiser's, in height and in width."""
        return 1 if self.vae is None else autoencoder_scale(self.vae.config)

    def decode(self, x: Tensor, output_type: str) -> Any:
        """What the denoiser ends with, (N, H, W, C) float32, as pictures; see `pictures.decode`."""
        return decode(x if self.vae is None else decode_latents(self.vae, x), output_type)

    def __call__(self, *, return_dict: bool = True, **options) -> PipelineOutput | tuple[Any]:
        """Draw pictures. Takes the options of `stream`; returns PipelineOutput, or a tuple of its images."""
        for step in self.stream(**options):
            images = step.images
        return PipelineOutput(images) if return_dict else (images,)

    def stream(
        self,
        *,
        num_inference_steps: int | None = None,
        num_images: int = 1,
        seed: int | Sequence[int] = 0,
        class_labels: Label | Sequence[Label] | Tensor = None,
        guidance_scale: float | None = None,
        eta: float | None = None,
        use_clipped_model_output: bool | None = None,
        batch_size: int | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: Generator | list[Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
    ) -> Iterator[Step]:
        """Draw pictures and yield a Step after each step; the last one has the finished `images`.

        The pictures are labels x seeds, in that order. With `batch_size` (or a tensor of labels, a list of generators,
        or latents) they are that many, each with a seed and a label of its own.

        Args:
            num_inference_steps: default: the model's own, else 50 for DDIM and all training steps for DDPM.
            num_images: pictures per label; picture i has seed + i.
            seed: 0 to 2^32 - 1, or a list of seeds instead of `num_images`.
            class_labels: names, indices, None for the null label; or a tensor with a row for each picture. The labels
                of a group take turns: the picture of seed s has the group's label s % len(group).
            guidance_scale: 1 is unguided. Default: the model's own, else 1.
            eta, use_clipped_model_output: of DDIM. Default: the model's own, else 0 and False.
            height, width: pixels. Default: those of the model's sample_size.
            generator: torch draws all noise, in the order diffusers' pipelines draw, instead of `seed`.
            latents: (N, C, H, W), the starting noise, of the size that the denoiser works at.
            output_type: pil, np or pt.

        Raises InputError naming what cannot be drawn, at once; NonFiniteError for NaN in the output.
        """
        if output_type not in OUTPUT_TYPES:
            raise InputError(f"output_type: {output_type!r} is none of {', '.join(OUTPUT_TYPES)}")
        counts = {
            "batch_size": batch_size,
            "generator": len(generator) if isinstance(generator, list) else None,
            "latents": len(latents) if latents is not None else None,
        }
        labels, seeds = list_pictures(seed, num_images, class_labels, counts)
        schedule = self._schedule(num_inference_steps, eta, use_clipped_model_output)
        distinct, rows, guidance = self._conditions(labels, seeds, guidance_scale)
        x_t = self._starting_noise(seeds, height, width, generator, latents)

        def draw_noise() -> Tensor:
            shape = x_t.permute(0, 3, 1, 2).shape
            return randn_tensor(shape, generator, self.device, self.dtype).permute(0, 2, 3, 1)

        def run() -> Iterator[Step]:
            table = Table(self.denoiser, schedule.timesteps, distinct)
            noise = torch.tensor(seeds, device=self.device) if generator is None else draw_noise
            steps = denoise(self.denoiser, x_t, schedule, table, rows, noise=noise, guidance=guidance)
            for i, (x, x0) in enumerate(steps):
                images = self.decode(x, output_type) if i == len(schedule) - 1 else None
                yield Step(i, len(schedule), int(schedule.timesteps[i]), images, x, x0, self.decode)

        return run()

    def _schedule(self, steps: int | None, eta: float | None, use_clipped_model_output: bool | None) -> Schedule:
        ddim = isinstance(self.scheduler, DDIMScheduler)
        if ddim:
            eta = self.info.eta if eta is None else eta
            if use_clipped_model_output is None:
                use_clipped_model_output = self.info.use_clipped_model_output
        if steps is None:
            steps = self.info.num_inference_steps or (50 if ddim else len(self.scheduler))
        schedule = self.scheduler.schedule(steps, eta=eta, use_clipped_model_output=use_clipped_model_output)
        channels = self.denoiser.config.in_channels, self.denoiser.config.out_channels
        halves = (1, 2) if schedule.options.variance == "fixed" else (2,)
        if channels[1] not in [half * channels[0] for half in halves]:
            raise InputError(
                f"the model has {channels[0]} input and {channels[1]} output channels, which does not fit the "
                f"scheduler's {schedule.options.variance} variance; correct variance_type in its config"
            )
        return schedule.to(self.device)

    def _starting_noise(
        self,
        seeds: list[int],
        height: int | None,
        width: int | None,
        generator: Generator | list[Generator] | None,
        latents: Tensor | None,
    ) -> Tensor:
        """x_T (N, H, W, C) float32 on the device; height and width are the pictures'."""
        if latents is not None:
            if latents.ndim != 4 or latents.shape[1] != self.denoiser.config.in_channels:
                raise InputError(
                    f"latents: expected (N, {self.denoiser.config.in_channels}, H, W), got {tuple(latents.shape)}"
                )
            self.denoiser.config.check_size(*latents.shape[2:])
            noise = latents.to(self.device)
        else:
            shape = (self.denoiser.config.in_channels, *self._size(height, width))
            if generator is not None:
                noise = randn_tensor((len(seeds), *shape), generator, self.device, self.dtype)
            else:
                each = [torch.randn(shape, generator=Generator("cpu").manual_seed(seed)) for seed in seeds]
                noise = torch.stack(each).to(self.device)
        return noise.float().permute(0, 2, 3, 1).contiguous()

    def _size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Of what the denoiser draws, for pictures of height x width pixels."""
        default = self.denoiser.config.trained_size
        if default is not None:
            height, width = height or default[0] * self.scale, width or default[1] * self.scale
        if height is None or width is None:
            raise InputError("height, width: this model's config has no sample_size; give both")
        self.denoiser.config.check_size(height, width, self.scale)
        return height // self.scale, width // self.scale

    def _conditions(
        self, labels: list[Label], seeds: list[int], scale: float | None
    ) -> tuple[Tensor | None, Tensor, Guidance | None]:
        """The distinct labels (rows, ...) that the model is asked under, each picture's row, and the guidance."""
        config = self.denoiser.config
        if scale not in (None, 1) and (config.num_class_embeds is None or config.class_embed_type is not None):
            raise InputError(f"guidance_scale: {scale} needs a model with a null label; this one has none")
        if not config.takes_labels:
            if any(label is not None for label in labels):
                raise InputError("class_labels: this model is unconditional; leave them out")
            return None, torch.zeros(len(labels), dtype=torch.int64, device=self.device), None
        if config.class_embed_type is not None:
            if any(label is None or isinstance(label, str) for label in labels):
                raise InputError("class_labels: this model takes numbers, a row for each picture")
            each = torch.stack([torch.as_tensor(label, device=self.device) for label in labels])
            return each, torch.arange(len(labels), device=self.device), None
        indices = [self._label_index(label, seed) for label, seed in zip(labels, seeds, strict=True)]
        guidance_scale = self._guidance_scale(scale)
        guided = guidance_scale != 1 and any(index != self.info.null_label for index in indices)
        distinct = sorted({*indices, self.info.null_label} if guided else set(indices))
        rows = torch.tensor([distinct.index(index) for index in indices], device=self.device)
        guidance = Guidance(guidance_scale, distinct.index(self.info.null_label)) if guided else None
        return torch.tensor(distinct, device=self.device), rows, guidance

    def _label_index(self, label: Label, seed: int) -> int:
        if label is not None:
            return self.info.label_index(label, self.denoiser.config.num_class_embeds, seed)
        if self.info.null_label is None:
            last = self.denoiser.config.num_class_embeds - 1
            raise InputError(f"class_labels: this model has no null label; give labels, 0 to {last}")
        return self.info.null_label

    def _guidance_scale(self, scale: float | None) -> float:
        if scale is None:
            scale = self.info.guidance_scale if self.info.guidance_scale is not None else 1.0
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise InputError(f"guidance_scale: {scale!r} is not a number; 1 is unguided, 2 to 8 are usual")
        if scale != 1 and self.info.null_label is None:
            raise InputError(f"guidance_scale: {scale} needs a null label, and this model's fastdiff.json names none")
        return float(scale)

"""Pipeline: seeds and labels in, pictures out.

Seeds and labels -> noise, schedule and conditions -> the denoising loop -> pictures.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from fastdiff.arguments import instance, naming, optional, text
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import SchedulerName
from fastdiff.diffusion.conditions import Conditions, choose_conditions
from fastdiff.diffusion.decoding import OutputType, decode, join
from fastdiff.diffusion.finite import Extremes
from fastdiff.diffusion.loop import denoise
from fastdiff.diffusion.noise import Generators, Noise, check_generators
from fastdiff.diffusion.pictures import Label, checked_side, list_pictures
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers import SCHEDULERS, Scheduler, scheduler_from_config
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.execution.devices import check_move, dtype_name, naming_lost_device, resolve_device, resolve_dtype
from fastdiff.execution.memory import Portions, or_explain, remedies, smaller_portions
from fastdiff.execution.tensors import FLOATS, tensor
from fastdiff.models.autoencoder import Autoencoder, load_autoencoder
from fastdiff.models.classes import DENOISERS
from fastdiff.models.denoiser import Denoiser
from fastdiff.requests.defaults import LIBRARY, SEED, ModelFacts, Sampling, SamplingOptions, complete_sampling
from fastdiff.schema import checked

_log = logging.getLogger(__name__)


class PipelineOutput(NamedTuple):
    """images: PIL images, or (N, H, W, C) numpy or (N, C, H, W) torch float32 in [0, 1], as `output_type` asks."""

    images: Any


@dataclass(frozen=True)
class Step:
    """The state after a step, as `Pipeline.stream` yields it."""

    index: int  # 0 to num_steps - 1
    num_steps: int
    timestep: int
    images: Any  # the finished pictures after the last step, else None
    x_t: Tensor  # (N, H, W, C) float32, the state after the step; latents where the pipeline has a VAE
    x0: Tensor  # (N, H, W, C) float32, the end of it as the model predicts it now
    at_once: int  # pictures that were computed together: fewer than all where more do not fit in memory
    decoder: Callable[[Tensor, str], Any] = decode  # of x_t or x0, and an output type

    @property
    def notice(self) -> str | None:
        """A line that says so where not all pictures were computed together."""
        return smaller_portions(len(self.x_t), self.at_once)

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
        vae: Autoencoder | None = None,
    ):
        """`vae`: diffusers' AutoencoderKL, for a denoiser of latents. InputError where the two do not fit together."""
        instance("denoiser", denoiser, Denoiser, "a UNet2DModel or DiTTransformer2DModel of fastdiff")
        optional(instance, "info", info, ModelInfo, "a ModelInfo")
        text("name", name)
        channels = getattr(getattr(vae, "config", None), "latent_channels", None)
        if vae is not None and channels is None:
            raise InputError(f"vae: {type(vae).__name__} is none; give diffusers' AutoencoderKL")
        if vae is not None and channels != denoiser.config.in_channels:
            raise InputError(
                f"vae: it decodes {channels} channels and the model denoises "
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
        **hub_options: Any,
    ) -> "Pipeline":
        """A bundled name, a pipeline folder that diffusers saved, or a hub id.

        Args:
            device: auto takes a GPU where there is one.
            dtype: auto is float32 on the CPU and bfloat16 on a GPU.
            scheduler: ddim or ddpm, made from the folder's scheduler config. Default: what the folder says.
            variant: of the weights' files, such as fp16.
            hub_options: `revision`, `token`, `local_files_only`.

        Raises InputError for whatever cannot be loaded, NonFiniteError for NaN in the weights; OutOfMemoryError, which
        is Python's MemoryError and torch's OutOfMemoryError, and DeviceLostError where the GPU fails.
        """
        device = resolve_device(device)  # before anything is downloaded for it
        dtype = resolve_dtype(dtype, device)
        checked("scheduler", scheduler, SchedulerName | None)
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
        checked("scheduler", scheduler, SchedulerName | None)
        with naming_lost_device():
            denoiser, vae = or_explain(
                partial(_load_models, card, device=device, dtype=dtype, variant=variant),
                f"{device}: out of memory for the weights of {card.name} in {dtype_name(dtype)}; "
                + remedies("end what else runs there", dtype),
            )
        config = read_json(hub.component_folder(card.folder, "scheduler") / "scheduler_config.json")
        scheduler = scheduler or ModelFacts.of(card).default_scheduler
        return cls(denoiser, scheduler_from_config(config, scheduler), card.info, card.name, vae)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        """Ours, or diffusers' DDPMScheduler or DDIMScheduler, whose config is taken over."""
        if not isinstance(scheduler, Scheduler):
            config = getattr(scheduler, "config", None)
            if not isinstance(config, Mapping):
                raise InputError(
                    f"scheduler: {type(scheduler).__name__} is none; give a DDIMScheduler or DDPMScheduler"
                )
            scheduler = scheduler_from_config({**config, "_class_name": type(scheduler).__name__})
        self._scheduler = scheduler

    @property
    def scheduler_name(self) -> str:
        """The scheduler's name in requests: ddim or ddpm."""
        return next(name for name, kind in SCHEDULERS.items() if isinstance(self.scheduler, kind))

    @property
    def device(self) -> torch.device:
        return self.denoiser.device

    @property
    def dtype(self) -> torch.dtype:
        return self.denoiser.dtype

    def to(self, *args: Any, **kwargs: Any) -> "Pipeline":
        """Move the models to a device or dtype, as torch's Module.to does. InputError where they cannot go there."""
        check_move(*args, **kwargs)
        self.denoiser.to(*args, **kwargs)
        if self.vae is not None:
            self.vae.to(*args, **kwargs)
        return self

    @property
    def scale(self) -> int:
        """Pixels of a picture for one of the denoiser's, in height and in width."""
        return 1 if self.vae is None else AutoencoderKLConfig.from_mapping(self.vae.config, "vae").scale

    def decode(self, x: Tensor, output_type: str) -> Any:
        """Return what the denoiser ends with, (N, H, W, C) float32, as pictures; see `decoding.decode`."""
        return decode(x, output_type, self.vae)

    def __call__(self, *, return_dict: bool = True, **options: Any) -> PipelineOutput | tuple[Any]:
        """Draw pictures. Takes the options of `stream`; returns PipelineOutput, or a tuple of its images.

        Where memory runs out it draws fewer of them at a time, and logs a warning.
        """
        checked("return_dict", return_dict, bool)
        warned = False
        for step in self.stream(**options):
            images = step.images
            if step.notice and not warned:
                _log.warning(step.notice)
                warned = True
        return PipelineOutput(images) if return_dict else (images,)

    def stream(
        self,
        *,
        num_inference_steps: int | None = None,
        num_images: int = LIBRARY.pictures,
        seed: int | Sequence[int] = SEED,
        class_labels: Label | Sequence[Label] | Tensor = None,
        guidance_scale: float | None = None,
        eta: float | None = None,
        use_clipped_model_output: bool | None = None,
        batch_size: int | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: Generators | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
    ) -> Iterator[Step]:
        """Draw pictures and yield a Step after each step; the last one has the finished `images`.

        The pictures are labels x seeds, in that order. With `batch_size` (or a tensor of labels, a list of generators,
        or latents) they are that many, each with a seed and a label of its own.

        Args:
            num_inference_steps: default: the model's own, else 50 for DDIM and all training steps for DDPM; this and
                all other defaults come from `requests.defaults`.
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

        Where memory runs out, pictures that have seeds go on half as many at a time, with the same bits: see
        `Step.at_once`. Those of a generator do not.

        Raises InputError naming what cannot be drawn, at once; NonFiniteError naming the step whose output is NaN or
        infinite; OutOfMemoryError, which is Python's MemoryError and torch's OutOfMemoryError, where not even one
        picture fits; DeviceLostError where the GPU fails.
        """
        checked("output_type", output_type, OutputType)
        height, width = checked_side("height", height), checked_side("width", width)
        check_generators(generator, self.device)
        self._check_latents(latents)
        counts = {
            "batch_size": batch_size,
            "generator": len(generator) if isinstance(generator, list) else None,
            "latents": len(latents) if latents is not None else None,
        }
        labels, seeds = list_pictures(seed, num_images, class_labels, counts)
        sampling = self._complete(num_inference_steps, eta, use_clipped_model_output, guidance_scale)
        schedule = self._schedule(sampling)
        conditions = choose_conditions(
            labels, seeds, sampling.guidance_scale, self.denoiser.config, self.info, self.device
        )
        noise = Noise(seeds, self._shape(height, width, latents), generator, self.device, self.dtype)
        portions = Portions(
            len(seeds), self.device, self.dtype, halves=generator is None, release=self.denoiser.release_graphs
        )
        with naming_lost_device():
            x_t = or_explain(partial(noise.start, latents), portions.problem)
        return self._run(x_t, schedule, conditions, noise, portions, output_type)

    def _run(
        self,
        x_t: Tensor,
        schedule: Schedule,
        conditions: Conditions,
        noise: Noise,
        portions: Portions,
        output_type: str,
    ) -> Iterator[Step]:
        extremes = Extremes(schedule, self.device)
        decoder = partial(self._decode, portions=portions, extremes=extremes)
        with naming_lost_device():
            steps = denoise(self.denoiser, x_t, schedule, conditions, noise=noise.of_steps(), portions=portions)
            for i, (x, x0) in enumerate(steps):
                extremes.note(i, x)
                images = decoder(x, output_type) if i == len(schedule) - 1 else None
                timestep = int(schedule.timesteps[i])
                yield Step(i, len(schedule), timestep, images, x, x0, portions.size, decoder)

    def _decode(self, x: Tensor, output_type: str, *, portions: Portions, extremes: Extremes) -> Any:
        """`decode` during a run: as many pictures at a time as fit, and an error names the step."""
        try:
            with naming_lost_device():
                return join(portions.map(lambda part: self.decode(x[part], output_type), len(x)), output_type)
        except NonFiniteError as error:
            raise extremes.naming_step(error) from None

    def _complete(
        self, steps: int | None, eta: float | None, use_clipped_model_output: bool | None, guidance_scale: float | None
    ) -> Sampling:
        config = self.denoiser.config
        return complete_sampling(
            SamplingOptions(self.scheduler_name, steps, eta, use_clipped_model_output, guidance_scale),
            ModelFacts(self.info, self.scheduler_name, len(self.scheduler)),
            LIBRARY,
            labelled=config.label_table is not None,
        )

    def _schedule(self, sampling: Sampling) -> Schedule:
        schedule = self.scheduler.schedule(
            sampling.num_inference_steps,
            eta=sampling.eta,
            use_clipped_model_output=sampling.use_clipped_model_output,
        )
        channels = self.denoiser.config.in_channels, self.denoiser.config.out_channels
        halves = (1, 2) if schedule.options.variance == "fixed" else (2,)
        if channels[1] not in [half * channels[0] for half in halves]:
            raise InputError(
                f"the model has {channels[0]} input and {channels[1]} output channels, which does not fit the "
                f"scheduler's {schedule.options.variance} variance; correct variance_type in its config"
            )
        return schedule.to(self.device)

    def _shape(self, height: int | None, width: int | None, latents: Tensor | None) -> tuple[int, ...]:
        """Return (C, H, W) of what the denoiser draws: that of `latents`, or for pictures of height x width pixels."""
        config = self.denoiser.config
        if latents is None:
            return config.in_channels, *self._size(height, width)
        sides = latents.shape[2:]
        with naming("latents"):
            config.check_size(*sides)
        for name, asked, side in zip(("height", "width"), (height, width), sides, strict=True):
            if asked not in (None, side * self.scale):
                raise InputError(
                    f"latents: they make pictures of {name} {side * self.scale}, and {name} is {asked}; leave it out"
                )
        return tuple(latents.shape[1:])

    def _check_latents(self, latents: Tensor | None) -> None:
        channels = self.denoiser.config.in_channels
        if latents is None:
            return
        tensor("latents", latents, FLOATS)
        if latents.ndim != 4 or latents.shape[1] != channels:
            raise InputError(f"latents: expected (N, {channels}, H, W), got {tuple(latents.shape)}")

    def _size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Return the height and width of what the denoiser draws, for pictures of height x width pixels."""
        default = self.denoiser.config.trained_size
        if default is not None:
            height = default[0] * self.scale if height is None else height
            width = default[1] * self.scale if width is None else width
        if height is None or width is None:
            raise InputError("height, width: this model's config has no sample_size; give both")
        self.denoiser.config.check_size(height, width, self.scale)
        return height // self.scale, width // self.scale


def _load_models(
    card: ModelCard, *, device: torch.device, dtype: torch.dtype, variant: str | None
) -> tuple[Denoiser, Autoencoder | None]:
    options: dict[str, Any] = {"variant": variant, "dtype": dtype, "device": device}
    folder = hub.component_folder(card.folder, card.denoiser.name)
    denoiser = DENOISERS[card.denoiser.class_name].from_folder(folder, **options)
    return denoiser, load_autoencoder(card.folder / "vae", **options) if "vae" in card.classes else None

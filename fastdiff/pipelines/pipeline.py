"""Pipeline: seeds and labels in, pictures out; of a model of one dimension, trajectories.

Seeds and labels -> noise, schedule and conditions -> the denoising loop -> pictures.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from fastdiff.arguments import instance, optional, text
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import SchedulerName
from fastdiff.diffusion.conditions import choose_conditions
from fastdiff.diffusion.decoding import OutputType, check_channels, decode, join
from fastdiff.diffusion.finite import Extremes
from fastdiff.diffusion.loop import denoise
from fastdiff.diffusion.noise import Generators, Noise, check_generators
from fastdiff.diffusion.pictures import Label, check_latents, check_state, list_pictures, picture_shape
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers import Scheduler, name_of, scheduler_from_config
from fastdiff.diffusion.trajectories import (
    TrajectoryOutput,
    TrajectoryOutputType,
    check_kind,
    check_parts,
    check_unguided,
    choose_ranking,
    decode_trajectories,
    known_rows,
    place_conditions,
    read_conditions,
    sort_trajectories,
    trajectory_shape,
    trajectory_values,
)
from fastdiff.errors import InputError
from fastdiff.execution.devices import check_move, dtype_name, naming_lost_device, resolve_device, resolve_dtype
from fastdiff.execution.memory import Portions, or_explain, remedies
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import DENOISERS, load_models
from fastdiff.models.denoiser import Denoiser
from fastdiff.requests.defaults import LIBRARY, SEED, ModelFacts, Sampling, SamplingOptions, complete_sampling
from fastdiff.results import PipelineOutput, Step
from fastdiff.schema import checked

_log = logging.getLogger(__name__)


class Pipeline:
    """A denoiser, its scheduler and its labels: draws as diffusers' DDPMPipeline, DDIMPipeline and DiTPipeline do.

    With a UNet1DModel it plans trajectories, as diffusers' ValueGuidedRLPipeline without guidance by the value's
    gradient: that is not here, but `sort_by_value` puts the best trajectories first.

    Beyond those it guides class-conditional models that have a null label, and the picture of a seed has the same
    bits alone, in any batch and at any place in it (given `seed`; a `generator` draws as diffusers does).
    """

    def __init__(
        self,
        denoiser: Denoiser,
        scheduler: Any,
        info: ModelInfo | None = None,
        name: str = "model",
        vae: AutoencoderKL | None = None,
        value_function: Denoiser | None = None,
    ):
        """`vae`: an AutoencoderKL, for a denoiser of latents. `value_function`: a UNet1DModel that says what
        trajectories are worth, for a denoiser of such. InputError where the models do not fit together.
        """
        instance("denoiser", denoiser, Denoiser, f"a {' or '.join(DENOISERS)} of fastdiff")
        optional(instance, "info", info, ModelInfo, "a ModelInfo")
        text("name", name)
        optional(instance, "vae", vae, AutoencoderKL, "an AutoencoderKL of fastdiff")
        if vae is not None and vae.config.latent_channels != denoiser.config.in_channels:
            raise InputError(
                f"vae: it decodes {vae.config.latent_channels} channels and the model denoises "
                f"{denoiser.config.in_channels}; give the VAE that the model was trained with"
            )
        check_parts(denoiser, value_function)
        self.denoiser, self.name, self.vae, self.value_function = denoiser, name, vae, value_function
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
            scheduler: a name such as ddim, ddpm, euler or euler-a (an unknown one is told all), made from the folder's
                scheduler config. Default: what the folder says.
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
            denoiser, vae, value_function = or_explain(
                partial(load_models, card, device=device, dtype=dtype, variant=variant),
                f"{device}: out of memory for the weights of {card.name} in {dtype_name(dtype)}; "
                + remedies("end what else runs there", dtype),
            )
        config = read_json(hub.component_folder(card.folder, "scheduler") / "scheduler_config.json")
        scheduler = scheduler or ModelFacts.of(card).default_scheduler
        return cls(denoiser, scheduler_from_config(config, scheduler), card.info, card.name, vae, value_function)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        """One of ours, or diffusers' class of the same name, whose config is taken over."""
        if not isinstance(scheduler, Scheduler):
            config = getattr(scheduler, "config", None)
            if not isinstance(config, Mapping):
                raise InputError(
                    f"scheduler: {type(scheduler).__name__} is none; give one of fastdiff's, such as a DDIMScheduler"
                )
            scheduler = scheduler_from_config({**config, "_class_name": type(scheduler).__name__})
        self._scheduler = scheduler

    @property
    def scheduler_name(self) -> str:
        """The scheduler's name in requests: ddim, ddpm, euler-karras."""
        return name_of(self.scheduler)

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
        for companion in (self.vae, self.value_function):
            if companion is not None:
                companion.to(*args, **kwargs)
        return self

    def _release_graphs(self) -> None:
        for model in (self.denoiser, self.vae, self.value_function):
            if model is not None:
                model.release_graphs()

    @property
    def plans_trajectories(self) -> bool:
        """Whether it plans trajectories, rather than to draw pictures."""
        return self.denoiser.config.of_trajectories

    @property
    def scale(self) -> int:
        """Pixels of a picture for one of the denoiser's, in height and in width."""
        return 1 if self.vae is None else self.vae.config.scale

    def decode(self, x: Tensor, output_type: str) -> Any:
        """Return what the denoiser ends with, (N, H, W, C) float32, as pictures; see `decoding.decode`.

        Trajectories, (N, 1, L, C), are returned as (N, C, L): see `trajectories.decode_trajectories`. InputError where
        `x` is neither.
        """
        x, output_type = check_state(x, self.denoiser.config), self._output_type(output_type)
        return decode_trajectories(x, output_type) if self.plans_trajectories else decode(x, output_type, self.vae)

    def __call__(
        self, *, return_dict: bool = True, **options: Any
    ) -> PipelineOutput | TrajectoryOutput | tuple[Any, ...]:
        """Draw pictures, or plan trajectories. Takes the options of `stream`.

        Returns PipelineOutput or TrajectoryOutput, or a plain tuple of what that holds. Where memory runs out it
        computes fewer of them at a time, and logs a warning.
        """
        checked("return_dict", return_dict, bool)
        warned = False
        for step in self.stream(**options):
            output = step.trajectories or PipelineOutput(step.images)
            if step.notice and not warned:
                _log.warning(step.notice)
                warned = True
        return output if return_dict else tuple(output)

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
        horizon: int | None = None,
        conditions: Mapping[int, Any] | None = None,
        sort_by_value: bool = False,
        n_guide_steps: int = 0,
        generator: Generators | None = None,
        latents: Tensor | None = None,
        output_type: str | None = None,
    ) -> Iterator[Step]:
        """Draw pictures and yield a Step after each step; the last one has the finished `images`, or `trajectories`.

        The pictures are labels x seeds, in that order. With `batch_size` (or a tensor of labels, a list of generators,
        latents, or conditions with a row for each) they are that many, each with a seed and a label of its own.

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
            horizon: positions of a trajectory, in the place of height and width. Default: the model's sample_size,
                where that is not diffusers' default of 65,536.
            conditions: {position: values} of trajectories, positions from 0, values (k,) or (N, k) of the last k
                channels, in the numbers that the model was trained on: to normalise them is the caller's. They are set
                in the noise and after every step.
            sort_by_value: the trajectories come best first, by the pipeline's value_function.
            n_guide_steps: 0; guidance by the value's gradient, which diffusers has under this name, is not here.
            generator: torch draws all noise, in the order diffusers' pipelines draw, instead of `seed`; of trajectories
                in the order (N, C, L), as a loop over diffusers' UNet1DModel.
            latents: (N, C, H, W) or (N, C, L), the starting noise, of the size that the denoiser works at.
            output_type: pil, np or pt; of trajectories np or pt. Default: the first.

        Where memory runs out, pictures that have seeds go on half as many at a time, with the same bits: see
        `Step.at_once`. Those of a generator do not.

        Raises InputError naming what cannot be drawn, at once; NonFiniteError naming the step whose output is NaN or
        infinite; OutOfMemoryError, which is Python's MemoryError and torch's OutOfMemoryError, where not even one
        picture fits; DeviceLostError where the GPU fails.
        """
        check_kind(self.denoiser.config, height=height, width=width, horizon=horizon, conditions=conditions)
        check_unguided(n_guide_steps)
        output_type = self._output_type(output_type)
        check_generators(generator, self.device)
        check_latents(latents, self.denoiser.config)
        known_positions = read_conditions(conditions)
        counts = {
            "batch_size": batch_size,
            "generator": len(generator) if isinstance(generator, list) else None,
            "latents": len(latents) if latents is not None else None,
            "conditions": known_rows(known_positions),
        }
        labels, seeds = list_pictures(seed, num_images, class_labels, counts)
        sampling = self._complete(num_inference_steps, eta, use_clipped_model_output, guidance_scale)
        schedule = self._schedule(sampling)
        labels_and_guidance = choose_conditions(
            labels, seeds, sampling.guidance_scale, self.denoiser.config, self.info, self.device
        )
        shape = self._shape(height, width, horizon, latents)
        known = place_conditions(known_positions, shape[-1], shape[0], self.device)
        value_function = choose_ranking(self.value_function, sort_by_value, shape[-1])
        noise = Noise(seeds, shape, generator, self.device, self.dtype)
        portions = Portions(len(seeds), self.device, self.dtype, halves=generator is None, release=self._release_graphs)
        start = partial(noise.start, None if latents is None else latents.reshape(-1, *shape))
        with naming_lost_device():
            x_t = or_explain(start, portions.problem)
            if schedule.init_noise_sigma != 1:
                x_t = x_t * schedule.init_noise_sigma
            from_steps = noise.of_steps(schedule.noise_dtype)
        steps = denoise(
            self.denoiser, x_t, schedule, labels_and_guidance, noise=from_steps, portions=portions, known=known
        )
        return self._run(steps, schedule, portions, output_type, value_function)

    def _run(
        self,
        steps: Iterator[tuple[Tensor, Tensor]],
        schedule: Schedule,
        portions: Portions,
        output_type: Any,
        value_function: Denoiser | None,
    ) -> Iterator[Step]:
        extremes = Extremes(schedule, self.device)
        decoder = partial(self._decode, portions, extremes)
        with naming_lost_device():
            for i, (x, x0) in enumerate(steps):
                extremes.note(i, x)
                images = decoder(x, output_type) if i == len(schedule) - 1 else None
                trajectories = None
                if self.plans_trajectories and images is not None:
                    images, trajectories = None, self._sort(x, images, portions, value_function)
                timestep = schedule.timesteps[i].item()
                yield Step(i, len(schedule), timestep, images, x, x0, portions.size, decoder, trajectories)

    def _decode(self, portions: Portions, extremes: Extremes, x: Tensor, output_type: str) -> Any:
        """`decode` during a run: as many pictures at a time as fit, and an error names the step."""
        with naming_lost_device(), extremes.naming_step():
            return join(portions.map(lambda part: self.decode(x[part], output_type), len(x)), output_type)

    def _sort(
        self, x: Tensor, trajectories: Any, portions: Portions, value_function: Denoiser | None
    ) -> TrajectoryOutput:
        """Return the finished trajectories of x (N, 1, L, C), the best first where there is a value function."""
        if value_function is None:
            return TrajectoryOutput(trajectories)
        values = portions.map(lambda part: trajectory_values(value_function, x[part]), len(x))
        return sort_trajectories(trajectories, torch.cat(values))

    def _output_type(self, output_type: Any) -> str:
        """Return one that it has; for None the first. Raises InputError for any other."""
        kind = TrajectoryOutputType if self.plans_trajectories else OutputType
        if output_type is None:
            output_type = get_args(kind)[0]
        check_channels(self._channels, checked("output_type", output_type, kind))
        return output_type

    @property
    def _channels(self) -> int:
        """Those of what is drawn."""
        return self.denoiser.config.sample_channels if self.vae is None else self.vae.config.out_channels

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
        if self.plans_trajectories and (schedule.scales_input or schedule.keeps_output is not None):
            raise InputError(f"scheduler {self.scheduler_name}: trajectories are planned with ddim or ddpm; choose one")
        channels = self.denoiser.config.sample_channels, self.denoiser.config.out_channels
        halves = (1, 2) if schedule.options.variance == "fixed" else (2,)
        if channels[1] not in [half * channels[0] for half in halves]:
            raise InputError(
                f"the model has {channels[0]} input and {channels[1]} output channels, which does not fit the "
                f"scheduler's {schedule.options.variance} variance; correct variance_type in its config"
            )
        return schedule.to(self.device)

    def _shape(
        self, height: int | None, width: int | None, horizon: int | None, latents: Tensor | None
    ) -> tuple[int, int, int]:
        """Return (C, H, W) of what the denoiser draws: that of `latents`, or of what is asked for."""
        if self.plans_trajectories:
            return trajectory_shape(self.denoiser.config, horizon, latents)
        return picture_shape(self.denoiser.config, self.scale, height, width, latents)

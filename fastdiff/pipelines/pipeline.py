"""Pipeline: seeds and labels in, pictures out; of a model of one dimension, trajectories.

Seeds and labels -> noise, schedule and conditions -> the denoising loop -> pictures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.conditions import choose_conditions
from fastdiff.diffusion.loop import denoise
from fastdiff.diffusion.noise import Generators, Noise, check_generators
from fastdiff.diffusion.pictures import Label, check_latents, list_pictures, picture_shape
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers import Scheduler
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
from fastdiff.execution.devices import naming_lost_device
from fastdiff.execution.memory import Portions, or_explain
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import Models
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import Model
from fastdiff.pipelines.base import BasePipeline
from fastdiff.pipelines.results import PipelineOutput, Step
from fastdiff.requests.defaults import LIBRARY, SEED, ModelFacts, Sampling, SamplingOptions, complete_sampling
from fastdiff.schema import checked


class Pipeline(BasePipeline):
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
        super().__init__(denoiser, scheduler, info, name, vae)
        if denoiser.config.prompt_shapes:
            raise InputError(
                f"denoiser: a {type(denoiser).__name__} draws from prompts; make a TextToImagePipeline of it"
            )
        check_parts(denoiser, value_function)
        self.value_function = value_function

    @classmethod
    def _of_card(cls, card: ModelCard, models: Models, scheduler: Scheduler) -> "Pipeline":
        return cls(models.denoiser, scheduler, card.info, card.name, models.vae, models.value_function)

    @property
    def models(self) -> tuple[Model, ...]:
        return (*super().models, *(() if self.value_function is None else (self.value_function,)))

    @property
    def plans_trajectories(self) -> bool:
        """Whether it plans trajectories, rather than to draw pictures."""
        return self.denoiser.config.of_trajectories

    def _begin_decode(self, x: Tensor, output_type: str) -> Callable[[], Any]:
        """As BasePipeline's; trajectories, (N, 1, L, C), are returned as (N, C, L): see `decode_trajectories`."""
        if not self.plans_trajectories:
            return super()._begin_decode(x, output_type)
        return partial(decode_trajectories, x, output_type)

    def __call__(
        self, *, return_dict: bool = True, **options: Any
    ) -> PipelineOutput | TrajectoryOutput | tuple[Any, ...]:
        """Draw pictures, or plan trajectories. Takes the options of `stream`.

        Returns PipelineOutput or TrajectoryOutput, or a plain tuple of what that holds. Where memory runs out it
        computes fewer of them at a time, and logs a warning.
        """
        return self._call(options, return_dict)

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
        prompt: None = None,
        wait: bool = True,
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
            prompt: of a model that reads text, which this is not: InputError.
            wait: for the GPU, whose queue has a few steps then, and for the pictures of the last one. If not, all steps
                are queued at once, and `Step.images` waits.

        Where memory runs out, pictures that have seeds go on half as many at a time, with the same bits: see
        `Step.at_once`. Those of a generator do not.

        Raises InputError naming what cannot be drawn, at once; NonFiniteError naming the step whose output is NaN or
        infinite; OutOfMemoryError, which is Python's MemoryError and torch's OutOfMemoryError, where not even one
        picture fits; DeviceLostError where the GPU fails.
        """
        check_kind(self.denoiser.config, height=height, width=width, horizon=horizon, conditions=conditions)
        check_unguided(n_guide_steps)
        if prompt is not None:
            raise InputError("prompt: this model has no text encoder; leave it out, or give a Stable Diffusion model")
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
        drawn = self._run(steps, schedule, portions, output_type, wait=wait)
        return self._planned(drawn, portions, value_function) if self.plans_trajectories else drawn

    def _planned(self, steps: Iterator[Step], portions: Portions, value_function: Denoiser | None) -> Iterator[Step]:
        """Yield the steps; the last one has finished trajectories, the best first where there is a value function."""
        for step in steps:
            if step.finish is None:
                yield step
                continue
            with naming_lost_device():
                trajectories = self._sort(step.x_t, step.images, portions, value_function)
            yield replace(step, finish=None, trajectories=trajectories)

    def _sort(
        self, x: Tensor, trajectories: Any, portions: Portions, value_function: Denoiser | None
    ) -> TrajectoryOutput:
        """Return the finished trajectories of x (N, 1, L, C), the best first where there is a value function."""
        if value_function is None:
            return TrajectoryOutput(trajectories)
        with self._working(value_function):
            values = portions.map(lambda part: trajectory_values(value_function, x[part]), len(x))
        return sort_trajectories(trajectories, torch.cat(values))

    def _output_type(self, output_type: Any) -> str:
        if not self.plans_trajectories:
            return super()._output_type(output_type)
        default, *_ = get_args(TrajectoryOutputType)
        return checked("output_type", default if output_type is None else output_type, TrajectoryOutputType)

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
        schedule = super()._schedule(sampling)
        if self.plans_trajectories and (schedule.scales_input or schedule.keeps_output is not None):
            raise InputError(f"scheduler {self.scheduler_name}: trajectories are planned with ddim or ddpm; choose one")
        return schedule

    def _shape(
        self, height: int | None, width: int | None, horizon: int | None, latents: Tensor | None
    ) -> tuple[int, int, int]:
        """Return (C, H, W) of what the denoiser draws: that of `latents`, or of what is asked for."""
        if self.plans_trajectories:
            return trajectory_shape(self.denoiser.config, horizon, latents)
        return picture_shape(self.denoiser.config, self.scale, height, width, latents)

"""Pipeline, the base class: loads the parts of a model folder and runs the denoising loop."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.loading import Load, chosen_device, chosen_dtype
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.diffusion.conditions import Conditions, choose_conditions
from fastdiff.diffusion.decoding import join
from fastdiff.diffusion.finite import Extremes
from fastdiff.diffusion.pictures import Subjects, check_latents, list_pictures, picture_shape
from fastdiff.diffusion.results import PipelineOutput, Step
from fastdiff.errors import InputError
from fastdiff.execution.devices import dtype_name, naming_lost_device
from fastdiff.execution.memory import Portions, or_explain, remedies
from fastdiff.execution.pace import Pace
from fastdiff.kinds import NotNegative, Precision
from fastdiff.pipelines.drawing import Drawing, DrawingOptions
from fastdiff.pipelines.giving import NOTHING, Given, load_parts, read_scheduler
from fastdiff.pipelines.saving import Saving
from fastdiff.pipelines.signatures import CALLS, by_name
from fastdiff.pipelines.surface import Surface
from fastdiff.requests.defaults import LIBRARY, PRECISION, ModelFacts, Sampling, SamplingOptions, complete_sampling
from fastdiff.requests.request import Request
from fastdiff.samplers.shared.from_config import folder_scheduler
from fastdiff.samplers.shared.noise import Noise, check_generators
from fastdiff.samplers.shared.schedule import Schedule
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked

AnyPipeline = TypeVar("AnyPipeline", bound="Pipeline")

_log = logging.getLogger(__name__)


def scheduler_of(card: ModelCard, name: str | None) -> Scheduler:
    """Return the scheduler `name`, made from a model folder's scheduler config. None: the model's default scheduler.

    Raises InputError if the scheduler config cannot be used.
    """
    config = read_json(hub.component_folder(card.folder, "scheduler") / "scheduler_config.json")
    name = name or ModelFacts.of(card).default_scheduler
    return folder_scheduler(config, name, card.scheduler, card.pipeline.scheduler_options)


class LastRun(NamedTuple):
    """The facts of the last call of a pipeline, which diffusers' pipelines show as attributes."""

    guidance_scale: float
    num_timesteps: int  # calls of the model
    guidance_rescale: float = 0.0
    clip_skip: int | None = None


class Pipeline(Saving, Surface, ABC):
    """The base class of all pipelines, which run model folders that diffusers saved.

    `Pipeline.from_pretrained` returns an instance of the subclass that matches the folder: a `LabelPipeline`, a
    `TextToImagePipeline` or a `TrajectoryPipeline`::

        pipe = fastdiff.Pipeline.from_pretrained("emoji-sd")
        pipe("a cat", seed=7).images[0].save("cat.png")

    A new kind of pipeline is a subclass with `_of_card` and `stream`, named by a row of
    `checkpoints.registry.PIPELINES`.
    """

    _last: LastRun | None = None

    kinds: ClassVar[dict[str, type["Pipeline"]]] = {}  # name -> subclass; filled when the subclass's module is imported

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Pipeline.kinds[cls.__name__] = cls

    @classmethod
    def from_pretrained(
        cls: type[AnyPipeline],
        pretrained_model_name_or_path: str | Path,
        *,
        device: str | torch.device | None = "auto",
        dtype: str | torch.dtype | Mapping[str, Any] | None = "auto",
        torch_dtype: str | torch.dtype | Mapping[str, Any] | None = None,
        device_map: str | torch.device | None = None,
        scheduler: Any = None,
        variant: str | None = None,
        use_safetensors: bool | None = None,
        offload: bool = False,
        precision: Precision = PRECISION,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        **options: Any,
    ) -> AnyPipeline:
        """Load a pipeline. The class of the returned pipeline depends on the folder.

        Args:
            pretrained_model_name_or_path: the name of a bundled model, a pipeline folder that diffusers saved, or a
                Hugging Face Hub id.
            device: `"auto"` uses a GPU if there is one, else the CPU.
            dtype: `"auto"` is float32 on the CPU and bfloat16 on a GPU. As in diffusers, a mapping of part names to
                dtypes is for each part; its key `"default"` is for the others, which otherwise are float32.
            torch_dtype: an older name of `dtype`.
            device_map: another name of `device`: a device for all parts. `"balanced"` and `"auto"` mean `"auto"`.
            scheduler: a name such as `"ddim"`, `"ddpm"`, `"euler"` or `"euler-a"`, or a scheduler of fastdiff or of
                diffusers. With a name, the scheduler is made from the folder's scheduler config. The error for an
                unknown name lists all names. Default: the scheduler that the folder names.
            variant: the variant of the weight files, such as `"fp16"`.
            use_safetensors: True reads safetensors alone, False .bin alone. By default safetensors are preferred.
            offload: keep each part in host memory, and move it to the GPU only while it runs. The pictures are the
                same; a run needs less GPU memory and more time.
            precision: `"int8"` stores the weights of the denoiser and of the text encoders in 8 bits. They need half
                the memory of 16-bit weights and cause an error, which `fastdiff verify MODEL --precision int8`
                measures. `"fp8"` also multiplies in 8 bits, and needs a GPU of sm_89 or later.
            revision: a branch, a tag or a commit of the hub.
            token: of the hub.
            local_files_only: use only files in the hub's cache.
            cache_dir: a folder to use instead of the hub's cache.
            force_download: download files again that are in the cache.
            options: parts that replace the folder's: `unet`, `transformer`, `vae`, `value_function`, `text_encoder`,
                `text_encoder_2`, `tokenizer`, `tokenizer_2`. A part is an object of fastdiff, or a live one of
                diffusers or transformers, which is copied. It keeps its dtype and moves to the device. The folder's
                part is then neither downloaded nor read. `text_encoder=None` loads a pipeline without it; calls then
                need `prompt_embeds`. SDXL takes `force_zeros_for_empty_prompt`. Other options of diffusers that change
                nothing here are accepted, such as `low_cpu_mem_usage` and `safety_checker=None`.

        Raises:
            InputError: the model cannot be loaded, the folder needs another class than this one, or an option cannot
                be honoured.
            NonFiniteError: the weights contain NaN.
            OutOfMemoryError: the weights do not fit. It is a MemoryError and a torch.OutOfMemoryError.
            DeviceLostError: the GPU fails.
        """
        scheduler_name, part = read_scheduler(scheduler)  # all arguments are checked before anything is downloaded
        load = Load.of(
            device=chosen_device(device, device_map),
            dtype=chosen_dtype(dtype, torch_dtype),
            variant=variant,
            precision=precision,
            offload=offload,
            scheduler=scheduler_name,
            use_safetensors=use_safetensors,
        )
        given = Given.read(options | part)
        folder = hub.resolve(
            pretrained_model_name_or_path,
            revision=revision,
            token=token,
            variant=variant,
            local_files_only=local_files_only,
            cache_dir=cache_dir,
            force_download=force_download,
            use_safetensors=use_safetensors,
            without=given.parts,
        )
        if not (folder / "model_index.json").is_file():
            raise InputError(f"{folder} has no model_index.json; a pipeline folder also holds the model's scheduler")
        card = given.read_card(str(pretrained_model_name_or_path), folder)
        pipe = cls.from_card(card, load, given)
        if card.notice:
            _log.warning(card.notice)
        return pipe

    @classmethod
    def from_card(cls: type[AnyPipeline], card: ModelCard, load: Load, given: Given = NOTHING) -> AnyPipeline:
        """Load the pipeline of a `ModelCard`: a folder whose configs are already read. Raises as `from_pretrained`.

        given: the parts that replace the folder's.
        """
        kind = Pipeline.kinds[card.drawn_by]
        if not issubclass(kind, cls):
            raise InputError(f"{card.name}: it needs a {kind.__name__}; load it with Pipeline.from_pretrained")
        with naming_lost_device():
            parts = or_explain(
                partial(load_parts, card, load, given),
                f"{load.home}: out of memory for the weights of {card.name} in {dtype_name(load.dtype)}; "
                + remedies("end what else runs there", load.dtype),
            )
        scheduler = given.scheduler(card.pipeline.scheduler_options) or scheduler_of(card, load.scheduler)
        pipe = kind._of_card(card, parts, scheduler)
        pipe._card = card
        return pipe.offloaded_from(load.device) if load.offload else pipe

    @classmethod
    def from_pipe(cls: type[AnyPipeline], pipeline: Any, **parts: Any) -> AnyPipeline:
        """Return a pipeline that shares the parts of another pipeline of fastdiff, except `parts`; see `with_parts`.

        Raises InputError for a pipeline of another class than this one.
        """
        if not isinstance(pipeline, cls):
            raise InputError(
                f"pipeline: {type(pipeline).__name__} is no {cls.__name__} of fastdiff; save it with save_pretrained, "
                "and load the folder with from_pretrained"
            )
        return pipeline.with_parts(**parts)

    @classmethod
    @abstractmethod
    def _of_card(
        cls: type[AnyPipeline], card: ModelCard, parts: Mapping[str, Any], scheduler: Scheduler
    ) -> AnyPipeline:
        """Return the pipeline of a folder. `parts`: part name (unet, vae, tokenizer ...) -> model or tokenizer."""

    @abstractmethod
    def stream(self, **options: Any) -> Iterator[Step]:
        """Draw pictures and yield a `Step` after each step. The last step has the finished pictures.

        Every kind of pipeline takes these arguments and adds its own. The defaults of sampling come from
        `requests.defaults`.

        If memory runs out, a run with seeds continues with half as many pictures at a time; the pictures keep the same
        bits (see `Step.at_once`). A run with a generator raises the error instead.

        Args:
            num_inference_steps: default: the model's own number; else 50, or all training steps for DDPM. A few
                samplers call the model more often.
            timesteps: the timesteps of the run, descending, instead of `num_inference_steps`, for samplers that
                support it.
            sigmas: the noise levels of the run, descending, instead of `num_inference_steps`, for samplers that support
                it.
            guidance_scale: 1 is unguided. Default: the model's own, else that of diffusers' pipeline, else 1.
            eta: of DDIM. Default: the model's own, else 0.
            use_clipped_model_output: of DDIM. Default: the model's own, else False.
            seed: 0 to 2^32 - 1, or a list of seeds.
            batch_size: the number of pictures. Each has its own seed.
            height: in pixels. Default: the model's sample_size.
            width: in pixels. Default: the model's sample_size.
            generator: a torch generator that draws all noise instead of `seed`, in the order of diffusers' pipelines;
                or a list with one generator for each picture.
            latents: the starting noise, (N, C, H, W) or (N, C, L), at the resolution of the denoiser.
            output_type: `"pil"` (the default), `"np"` or `"pt"`.
            wait: keep only a few steps in the GPU's queue, and wait for the pictures of the last step. With False, all
                steps are queued at once, and `Step.images` waits.

        Raises:
            InputError: an argument is wrong. The message names it, and the error is raised before the first step.
            NonFiniteError: the output of a step is NaN or infinite. The message names the step.
            OutOfMemoryError: not even one picture fits in memory, or a run with a generator does not fit. It is a
                MemoryError and a torch.OutOfMemoryError.
            DeviceLostError: the GPU fails.
        """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Draw pictures and return the output. Takes the arguments of `stream`, and `return_dict`.

        Arguments by position have the order of diffusers' pipeline: `pipe(prompt, height, width)` for Stable Diffusion,
        `pipe(batch_size)` for DDPM and DDIM, `pipe(class_labels, guidance_scale)` for DiT; see `signatures.CALLS`.

        If memory runs out, fewer pictures are computed at a time, and a warning is logged.

        Args:
            return_dict: True, the default, returns a named tuple (`PipelineOutput`, or `TrajectoryOutput` for
                trajectories). False returns a plain tuple.
        """
        options = by_name(CALLS.get(self.diffusers_class, ()), args, options, type(self).__name__)
        return_dict = checked("return_dict", options.pop("return_dict", True), bool)
        warned = False
        with ExitStack() as stack:
            for step in self.stream(**options):
                if step.index == 0:
                    bar = stack.enter_context(self.progress_bar(total=step.num_steps))
                bar.update()
                output = step.trajectories or PipelineOutput(step.images)
                if step.notice and not warned:
                    _log.warning(step.notice)
                    warned = True
        return output if return_dict else tuple(output)

    def _begin(self, options: DrawingOptions, subjects: Subjects, **counts: int | None) -> Drawing:
        """Return the `Drawing` of a call. Every argument is checked and every default is set; no noise is drawn yet.

        counts: argument name -> the number of pictures that the argument asks for. Raises InputError, which names the
        wrong argument.
        """
        output_type = self._output_type(options.output_type)
        check_generators(options.generator, self.device)
        check_latents(options.latents, self.denoiser.config)
        chosen, seeds = list_pictures(subjects, options.seed, options.counts | counts)
        sampling = self._complete(options)
        schedule = self._schedule(sampling, options.timesteps, options.sigmas)
        self._last = LastRun(sampling.guidance_scale, len(schedule))
        shape = self._shape(options)
        noise = Noise(seeds, shape, options.generator, self.device, self.dtype)
        halves = options.generator is None
        portions = Portions(len(seeds), self.device, self.dtype, halves=halves, release=self._release_graphs)
        return Drawing(chosen, shape, sampling, schedule, noise, options.latents, portions, output_type, options.wait)

    def _complete(self, options: DrawingOptions) -> Sampling:
        """Return the sampling options with every default set."""
        asked = SamplingOptions(
            self.scheduler_name,
            options.num_inference_steps,
            options.eta,
            options.use_clipped_model_output,
            checked("guidance_scale", options.guidance_scale, NotNegative | None),
        )
        facts = ModelFacts(self.info, self.scheduler_name, len(self.scheduler), self.reads_text)
        return complete_sampling(asked, facts, LIBRARY, labelled=self.denoiser.config.label_table is not None)

    def _conditions(self, drawing: Drawing) -> Conditions:
        """Return the conditions of the pictures of `drawing`, whose subjects are labels or None.

        Raises InputError for labels that the model does not have, and for guidance without a null label.
        """
        scale, config = drawing.sampling.guidance_scale, self.denoiser.config
        return choose_conditions(drawing.subjects, drawing.seeds, scale, config, self.info, self.device)

    def _shape(self, options: DrawingOptions) -> tuple[int, int, int]:
        """Return the shape (C, H, W) of the denoiser's output."""
        return picture_shape(self.denoiser.config, self.scale, options.height, options.width, options.latents)

    def _run(self, drawing: Drawing, steps: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Step]:
        """Yield a `Step` for each step of the loop. The last one has the pictures.

        With `drawing.wait` the GPU's queue holds only a few steps, and the pictures of the last step are finished.
        """
        schedule, portions = drawing.schedule, drawing.portions
        extremes = Extremes(schedule, self.device)
        decoder, pace = partial(self._decode, portions, extremes), Pace(self.device)
        steps = self._denoising(steps)
        with naming_lost_device():
            for i, (x, x0) in enumerate(steps):
                extremes.note(i, x)
                finish = None
                if i == len(schedule) - 1:
                    steps.close()  # the denoiser is finished, and offloading may free its memory for the VAE
                    finish = self._begin_decoding(portions, extremes, x, drawing.output_type)
                timestep = schedule.timesteps[i].item()
                step = Step(i, len(schedule), timestep, x, x0, portions.size, finish, decoder, self._small)
                if drawing.wait:
                    pace.note()
                    _ = step.images
                yield step

    def _denoising(self, steps: Iterator[tuple[Tensor, Tensor]]) -> Generator[tuple[Tensor, Tensor]]:
        """Yield the steps of the loop while the denoiser is on its device."""
        with self._working(self.denoiser):
            yield from steps

    def _decode(self, portions: Portions, extremes: Extremes, x: Tensor, output_type: str) -> Any:
        """`decode` during a run: decodes as many pictures at a time as fit, and an error names the step."""
        return self._begin_decoding(portions, extremes, x, output_type)()

    def _begin_decoding(self, portions: Portions, extremes: Extremes, x: Tensor, output_type: str) -> Callable[[], Any]:
        """Start `_decode`. Return a function that waits for the GPU and returns the pictures."""
        with naming_lost_device():
            ends = portions.map(lambda part: self._begin_decode(x[part], output_type), len(x))

        def end() -> Any:
            with naming_lost_device(), extremes.naming_step():
                return join([end() for end in ends], output_type)

        return end

    def _schedule(self, sampling: Sampling, timesteps: Any = None, sigmas: Any = None) -> Schedule:
        """Return the schedule of a run. `timesteps` or `sigmas` replace the number of steps, as in diffusers."""
        asked = {"timesteps": timesteps, "sigmas": sigmas}
        custom = {name: value for name, value in asked.items() if value is not None}
        steps: Any = None if custom else sampling.num_inference_steps
        schedule = self.scheduler.schedule(
            steps,
            eta=sampling.eta,
            use_clipped_model_output=sampling.use_clipped_model_output,
            **custom,
        )
        channels = self.denoiser.config.sample_channels, self.denoiser.config.prediction_channels
        halves = (1, 2) if schedule.options.variance == "fixed" else (2,)
        if channels[1] not in [half * channels[0] for half in halves]:
            raise InputError(
                f"the model has {channels[0]} input and {channels[1]} output channels, which does not match the "
                f"scheduler's {schedule.options.variance} variance; correct variance_type in its config"
            )
        return schedule.to(self.device)


def load_pipeline(card: ModelCard, request: Request, device: str, *, offload: bool = False) -> Pipeline:
    """Load the pipeline of a model folder as a request asks: its scheduler, dtype, variant and precision.

    Raises as `Pipeline.from_card`.
    """
    load = Load.of(
        device=device,
        dtype=request.dtype,
        variant=request.variant,
        precision=request.precision,
        offload=offload,
        scheduler=request.scheduler,
    )
    return Pipeline.from_card(card, load)

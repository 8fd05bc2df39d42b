"""Pipeline, the base class: runs the denoising loop."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import CONTROLNET
from fastdiff.checkpoints.single_files.ip_adapters import find_image_encoder, find_ip_adapter
from fastdiff.diffusion.conditions import Conditions, choose_conditions
from fastdiff.diffusion.decoding import join
from fastdiff.diffusion.finite import Extremes
from fastdiff.diffusion.pictures import Subjects, check_latents, list_pictures, picture_shape
from fastdiff.diffusion.results import PipelineOutput, Step
from fastdiff.diffusion.shared_steps import outside_turn
from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.execution.memory import Portions
from fastdiff.execution.pace import Pace
from fastdiff.kinds import NotNegative
from fastdiff.models.clip_vision import CLIPVisionModelWithProjection
from fastdiff.models.unet2d import UNet2DModel
from fastdiff.pipelines.drawing import Drawing, DrawingOptions, Start
from fastdiff.pipelines.folders import FromFolder
from fastdiff.pipelines.giving import NOTHING, Given
from fastdiff.pipelines.signatures import CALLS, by_name
from fastdiff.requests.defaults import LIBRARY, ModelFacts, Sampling, SamplingOptions, complete_sampling
from fastdiff.requests.file_option import FileOption, lora_names, weight_of
from fastdiff.requests.request import Request
from fastdiff.samplers.shared.noise import Noise, check_generators
from fastdiff.samplers.shared.schedule import Begin, Schedule
from fastdiff.schema import checked

_log = logging.getLogger(__name__)


class LastRun(NamedTuple):
    """The facts of the last call of a pipeline, which diffusers' pipelines show as attributes."""

    guidance_scale: float
    num_timesteps: int  # calls of the model
    guidance_rescale: float = 0.0
    clip_skip: int | None = None


class Pipeline(FromFolder):
    """The base class of all pipelines, which run model folders that diffusers saved.

    `Pipeline.from_pretrained` returns an instance of the subclass that matches the folder: a `LabelPipeline`, a
    `TextToImagePipeline` or a `TrajectoryPipeline`::

        pipe = fastdiff.Pipeline.from_pretrained("emoji-sd")
        pipe("a cat", seed=7).images[0].save("cat.png")

    A new kind of pipeline is a subclass with `_of_card` and `stream`, named by a row of
    `checkpoints.registry.PIPELINES`.
    """

    _last: LastRun | None = None

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
            eta: of DDIM and TCD, 0 to 1. Default: the model's own, else diffusers' for the kind of pipeline.
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

    @overload
    def __call__(self, *args: Any, return_dict: Literal[False], **options: Any) -> tuple[Any, ...]: ...

    @overload
    def __call__(self, *args: Any, output_type: Literal["np", "pt", "latent"], **options: Any) -> Any: ...

    @overload
    def __call__(self, *args: Any, **options: Any) -> PipelineOutput: ...

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
        with ExitStack() as stack:
            for step, made in self.outputs(**options):
                output = made
                if step.index == 0:
                    bar = stack.enter_context(self.progress_bar(total=step.num_steps))
                bar.update()
        return output if return_dict else tuple(output)

    def outputs(self, **options: Any) -> Generator[tuple[Step, Any], None, None]:
        """Yield each step of `stream` and the output so far. The call returns the last output.

        If memory runs out, a warning is logged once.
        """
        warned = False
        for step in self.stream(**options):
            yield step, step.trajectories or PipelineOutput(step.images)
            if step.notice and not warned:
                _log.warning(step.notice)
                warned = True

    def _begin(
        self,
        options: DrawingOptions,
        subjects: Subjects,
        starts_from: Start | None = None,
        ends: Callable[[Schedule, int], Schedule] | None = None,
        **counts: int | None,
    ) -> Drawing:
        """Return the `Drawing` of a call. Every argument is checked and every default is set; no noise is drawn yet.

        Args:
            ends: returns the first steps of a schedule, whose model has so many trained timesteps. Default: all.
            counts: argument name -> the number of pictures that the argument asks for.

        Raises InputError, which names the wrong argument.
        """
        output_type = self._output_type(options.output_type)
        check_generators(options.generator, self.device)
        check_latents(options.latents, self.denoiser.config)
        chosen, seeds = list_pictures(subjects, options.seed, options.counts | counts)
        sampling = self._complete(options, masked=starts_from is not None and starts_from.masked)
        if starts_from is not None:
            starts_from.check_count(len(seeds))
        begin = None if starts_from is None else starts_from.begin
        shape = self._shape(options)
        schedule = self._schedule(sampling, options.timesteps, options.sigmas, begin, shape)
        schedule = schedule if ends is None else ends(schedule, len(self.scheduler))
        self._last = LastRun(sampling.guidance_scale, len(schedule))
        noise = Noise(seeds, shape, options.generator, self.device, self._noise_dtype)
        halves = options.generator is None
        portions = Portions(len(seeds), self.device, self.dtype, halves=halves, release=self._release_graphs)
        return Drawing(
            chosen,
            shape,
            sampling,
            schedule,
            noise,
            options.latents,
            portions,
            output_type,
            options.wait,
            starts_from,
        )

    def _complete(self, options: DrawingOptions, *, masked: bool = False) -> Sampling:
        """Return the sampling options with every default set. masked: whether a mask says what to paint anew."""
        asked = SamplingOptions(
            self.scheduler_name,
            options.num_inference_steps,
            options.eta,
            options.use_clipped_model_output,
            checked("guidance_scale", options.guidance_scale, NotNegative | None),
        )
        facts = ModelFacts(self.info, self.scheduler_name, len(self.scheduler), self.reads_text)
        labelled = self.denoiser.config.label_table is not None
        return complete_sampling(asked, facts, LIBRARY, labelled=labelled, masked=masked)

    def _conditions(self, drawing: Drawing) -> Conditions:
        """Return the conditions of the pictures of `drawing`, whose subjects are labels or None.

        Raises InputError for labels that the model does not have, and for guidance without a null label.
        """
        scale, config = drawing.sampling.guidance_scale, self.denoiser.config
        return choose_conditions(drawing.subjects, drawing.seeds, scale, config, self.info, self.device)

    def _shape(self, options: DrawingOptions) -> tuple[int, int, int]:
        """Return the shape (C, H, W) of the denoiser's output."""
        return picture_shape(self.denoiser.config, self.scale, options.height, options.width, options.latents)

    def _run(self, drawing: Drawing, steps: Iterator[tuple[int, Tensor, Tensor]]) -> Iterator[Step]:
        """Yield a `Step` for each step of the loop. The last one has the pictures.

        With `drawing.wait` the GPU's queue holds only a few steps, and the pictures of the last step are finished.
        """
        schedule, portions = drawing.schedule, drawing.portions
        extremes = Extremes(schedule, self.device)
        decoder, pace = partial(self._decode, portions, extremes), Pace(self.device)
        draft = partial(self._draft, portions, extremes) if self._has_drafts else None
        steps = self._denoising(steps)
        with naming_lost_device():
            for i, x, x0 in steps:
                extremes.note(i, x)
                finish = None
                if i == len(schedule) - 1:
                    steps.close()  # the denoiser is finished, and offloading may free its memory for the VAE
                    finish = self._begin_decoding(portions, extremes, x, drawing.output_type)
                timestep = schedule.timesteps[i].item()
                step = Step(i, len(schedule), timestep, x, x0, portions.size, finish, decoder, self._small, draft)
                if drawing.wait:
                    pace.note()
                    _ = step.images
                yield step

    def _denoising(self, steps: Iterator[tuple[int, Tensor, Tensor]]) -> Generator[tuple[int, Tensor, Tensor]]:
        """Yield the steps of the loop while the denoiser is on its device."""
        with self._working(self.denoiser):
            yield from steps

    def _decode(self, portions: Portions, extremes: Extremes, x: Tensor, output_type: str) -> Any:
        """`decode` during a run: decodes as many pictures at a time as fit, and an error names the step."""
        return self._begin_decoding(portions, extremes, x, output_type)()

    def _draft(self, portions: Portions, extremes: Extremes, x0: Tensor) -> Any:
        """Return the PIL images of a preview by `preview_vae` or a linear map, as `_decode` does."""
        return self._begin_decoding(portions, extremes, x0, "pil", self._begin_draft)()

    def _begin_decoding(
        self,
        portions: Portions,
        extremes: Extremes,
        x: Tensor,
        output_type: str,
        begin: Callable[[Tensor, str], Callable[[], Any]] | None = None,
    ) -> Callable[[], Any]:
        """Start `_decode`. Return a function that waits for the GPU and returns the pictures.

        `begin` starts to decode a part of the batch; default: `_begin_decode`.
        """
        begin = begin or self._begin_decode
        with naming_lost_device():
            ends = portions.map(lambda part: begin(x[part], output_type), len(x))

        def end() -> Any:
            with outside_turn(), naming_lost_device(), extremes.naming_step():
                return join([end() for end in ends], output_type)

        return end

    @property
    def _noise_dtype(self) -> torch.dtype:
        """The dtype in which a generator draws the starting noise."""
        return self.dtype

    def _check_scheduler(self) -> None:
        """Raise InputError for a scheduler that needs another kind of prediction."""
        if self.scheduler.follows_flow and not isinstance(self.denoiser, UNet2DModel):  # as DDPMPipeline takes it
            raise InputError(
                f"scheduler {self.scheduler_name}: it needs a model that predicts the velocity of a flow; use another"
            )

    def _shift(self, shape: tuple[int, int, int] | None) -> float | None:
        """Return `mu` of a run, for a scheduler that shifts its sigmas by the latents' size (C, H, W)."""
        return None

    def _schedule(
        self,
        sampling: Sampling,
        timesteps: Any = None,
        sigmas: Any = None,
        begin: Begin | None = None,
        shape: tuple[int, int, int] | None = None,
    ) -> Schedule:
        """Return the schedule of a run. `timesteps` or `sigmas` replace the number of steps, as in diffusers.

        `begin` chooses the first model call. Raises InputError for options that the scheduler or the model lacks.
        """
        asked = {"timesteps": timesteps, "sigmas": sigmas}
        custom = {name: value for name, value in asked.items() if value is not None}
        steps: Any = None if custom else sampling.num_inference_steps
        self._check_scheduler()
        schedule = self.scheduler.schedule(
            steps,
            eta=sampling.eta,
            use_clipped_model_output=sampling.use_clipped_model_output,
            begin=begin,
            mu=self._shift(shape),
            **custom,
        )
        channels = self.denoiser.config.state_channels, self.denoiser.config.prediction_channels
        halves = (1, 2) if schedule.options.variance == "fixed" else (2,)
        if channels[1] not in [half * channels[0] for half in halves]:
            raise InputError(
                f"the model has {channels[0]} input and {channels[1]} output channels, which does not match the "
                f"scheduler's {schedule.options.variance} variance; correct variance_type in its config"
            )
        return schedule.to(self.device)


def load_pipeline(
    card: ModelCard, request: Request, device: str, *, offload: bool = False, names_loras: bool = False
) -> Pipeline:
    """Load the pipeline of a model folder as a request asks: its scheduler, dtype, variant, precision, ControlNets,
    embeddings, LoRAs and IP-Adapters.

    names_loras: whether prompts name LoRAs. If so, the LoRAs are adapters with the names of `lora_names`.

    Raises as `Pipeline.from_card`, `load_textual_inversion`, `load_lora_weights` and `load_ip_adapter`.
    """
    load = Load.of(
        device=device,
        dtype=request.dtype,
        variant=request.variant,
        precision=request.precision,
        offload=offload,
        scheduler=request.scheduler,
    )
    given = Given.read({CONTROLNET.name: [*request.control]}) if request.control else NOTHING
    pipe: Any = Pipeline.from_card(given.checked(card), load, given)  # without prompts, it refuses embeddings
    for text in request.embedding:
        file, token = FileOption.parse(text)
        pipe.load_textual_inversion(file, token=token)
    if request.lora:
        _load_loras(pipe, [FileOption.parse(text) for text in request.lora])
        if not names_loras:
            _fuse_loras(pipe)
    if request.ip_adapter:
        _load_ip_adapters(pipe, request)
    return pipe


def _load_loras(pipe: Any, options: Sequence[FileOption]) -> None:
    """Make these LoRAs the active adapters, in this order."""
    names = lora_names(options)
    for name, option in zip(names, options, strict=True):
        pipe.load_lora_weights(option.path, adapter_name=name)
    pipe.set_adapters(names, [weight_of(option) for option in options])


def _fuse_loras(pipe: Any) -> None:
    """Make the adapters a part of a pipeline's weights, so that no copy of the weights without them takes memory."""
    pipe.fuse_lora([*pipe.get_list_adapters()])
    pipe.unload_lora_weights()


def _load_ip_adapters(pipe: Any, request: Request) -> None:
    """Load the IP-Adapters of a request with their image encoder, and set their scales."""
    if not hasattr(pipe, "image_encoder"):  # other pipelines refuse `load_ip_adapter` by its name
        raise InputError(f"ip-adapter: {pipe.name} has no IP-Adapters; leave it out")
    folder = find_image_encoder(request.ip_adapter[0], request.image_encoder)
    where = {"dtype": pipe.denoiser.dtype, "device": pipe.denoiser.device}
    pipe.image_encoder = CLIPVisionModelWithProjection.from_pretrained(folder, **where)
    pipe.load_ip_adapter([find_ip_adapter(name) for name in request.ip_adapter])
    pipe.set_ip_adapter_scale([*request.ip_adapter_scale])

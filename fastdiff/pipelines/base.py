"""Pipeline, the base class: loads the parts of a model folder and runs the denoising loop."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.loading import Load
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
from fastdiff.models.classes import load_models
from fastdiff.models.unet2d import UNet2DModel
from fastdiff.pipelines.drawing import Drawing, DrawingOptions
from fastdiff.pipelines.parts import Parts
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


class Pipeline(Parts, ABC):
    """The base class of all pipelines, which run model folders that diffusers saved.

    `Pipeline.from_pretrained` returns an instance of the subclass that matches the folder: a `LabelPipeline`, a
    `TextToImagePipeline` or a `TrajectoryPipeline`::

        pipe = fastdiff.Pipeline.from_pretrained("emoji-sd")
        pipe("a cat", seed=7).images[0].save("cat.png")

    A new kind of pipeline is a subclass with `_of_card` and `stream`, named by a row of
    `checkpoints.registry.PIPELINES`.
    """

    kinds: ClassVar[dict[str, type["Pipeline"]]] = {}  # name -> subclass; filled when the subclass's module is imported

    def __init_subclass__(cls) -> None:
        Pipeline.kinds[cls.__name__] = cls

    @classmethod
    def from_pretrained(
        cls: type[AnyPipeline],
        name_or_path: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        scheduler: str | None = None,
        variant: str | None = None,
        offload: bool = False,
        precision: Precision = PRECISION,
        **hub_options: Any,
    ) -> AnyPipeline:
        """Load a pipeline. The class of the returned pipeline depends on the folder.

        Args:
            name_or_path: the name of a bundled model, a pipeline folder that diffusers saved, or a Hugging Face Hub id.
            device: `"auto"` uses a GPU if there is one, else the CPU.
            dtype: `"auto"` is float32 on the CPU and bfloat16 on a GPU.
            scheduler: a name such as `"ddim"`, `"ddpm"`, `"euler"` or `"euler-a"`. The scheduler is made from the
                folder's scheduler config. The error for an unknown name lists all names. Default: the scheduler that
                the folder names.
            variant: the variant of the weight files, such as `"fp16"`.
            offload: keep each part in host memory, and move it to the GPU only while it runs. The pictures are the
                same; a run needs less GPU memory and more time.
            precision: `"int8"` stores the weights of the denoiser and of the text encoders in 8 bits. They need half
                the memory of 16-bit weights and cause an error, which `fastdiff verify MODEL --precision int8`
                measures. `"fp8"` also multiplies in 8 bits, and needs a GPU of sm_89 or later.
            hub_options: `revision`, `token` and `local_files_only`.

        Raises:
            InputError: the model cannot be loaded, or the folder needs another class than this one.
            NonFiniteError: the weights contain NaN.
            OutOfMemoryError: the weights do not fit. It is a MemoryError and a torch.OutOfMemoryError.
            DeviceLostError: the GPU fails.
        """
        load = Load.of(  # checks the arguments before anything is downloaded
            device=device, dtype=dtype, variant=variant, precision=precision, offload=offload, scheduler=scheduler
        )
        folder = hub.resolve(name_or_path, variant=variant, **hub_options)
        if not (folder / "model_index.json").is_file():
            raise InputError(f"{folder} has no model_index.json; a pipeline folder also holds the model's scheduler")
        card = ModelCard.read(str(name_or_path), folder)
        pipe = cls.from_card(card, load)
        if card.notice:
            _log.warning(card.notice)
        return pipe

    @classmethod
    def from_card(cls: type[AnyPipeline], card: ModelCard, load: Load) -> AnyPipeline:
        """Load the pipeline of a `ModelCard`: a folder whose configs are already read. Raises as `from_pretrained`."""
        kind = Pipeline.kinds[card.drawn_by]
        if not issubclass(kind, cls):
            raise InputError(f"{card.name}: it needs a {kind.__name__}; load it with Pipeline.from_pretrained")
        with naming_lost_device():
            models = or_explain(
                partial(load_models, card, load),
                f"{load.home}: out of memory for the weights of {card.name} in {dtype_name(load.dtype)}; "
                + remedies("end what else runs there", load.dtype),
            )
        pipe = kind._of_card(card, models, scheduler_of(card, load.scheduler))
        return pipe.offloaded_from(load.device) if load.offload else pipe

    @classmethod
    @abstractmethod
    def _of_card(
        cls: type[AnyPipeline], card: ModelCard, models: Mapping[str, Any], scheduler: Scheduler
    ) -> AnyPipeline:
        """Return the pipeline of a folder. `models`: part name (unet, vae, text_encoder ...) -> model."""

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

    def __call__(self, *, return_dict: bool = True, **options: Any) -> Any:
        """Draw pictures and return the output. Takes the arguments of `stream`.

        If memory runs out, fewer pictures are computed at a time, and a warning is logged.

        Args:
            return_dict: True returns a named tuple (`PipelineOutput`, or `TrajectoryOutput` for trajectories). False
                returns a plain tuple.
        """
        checked("return_dict", return_dict, bool)
        warned = False
        for step in self.stream(**options):
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
        schedule = self._schedule(sampling)
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
        draft = None if self.preview_vae is None else partial(self._draft, portions, extremes)
        steps = self._denoising(steps)
        with naming_lost_device():
            for i, (x, x0) in enumerate(steps):
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

    def _denoising(self, steps: Iterator[tuple[Tensor, Tensor]]) -> Generator[tuple[Tensor, Tensor]]:
        """Yield the steps of the loop while the denoiser is on its device."""
        with self._working(self.denoiser):
            yield from steps

    def _decode(self, portions: Portions, extremes: Extremes, x: Tensor, output_type: str) -> Any:
        """`decode` during a run: decodes as many pictures at a time as fit, and an error names the step."""
        return self._begin_decoding(portions, extremes, x, output_type)()

    def _draft(self, portions: Portions, extremes: Extremes, x0: Tensor) -> Any:
        """Return the PIL images that `preview_vae` decodes, as `_decode` does."""
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
            with naming_lost_device(), extremes.naming_step():
                return join([end() for end in ends], output_type)

        return end

    def _schedule(self, sampling: Sampling) -> Schedule:
        if self.scheduler.follows_flow and not isinstance(self.denoiser, UNet2DModel):  # as DDPMPipeline takes it
            raise InputError(
                f"scheduler {self.scheduler_name}: it needs a model that predicts the velocity of a flow; use another"
            )
        schedule = self.scheduler.schedule(
            sampling.num_inference_steps,
            eta=sampling.eta,
            use_clipped_model_output=sampling.use_clipped_model_output,
        )
        channels = self.denoiser.config.sample_channels, self.denoiser.config.out_channels
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

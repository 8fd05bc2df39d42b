"""Pipeline, the base of all: loads the parts of a folder, and runs the denoising loop to pictures."""

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
    """Return the scheduler `name` of a model folder; for None the one that its pictures are drawn with by default.

    Raises InputError where the folder's scheduler config cannot be used.
    """
    config = read_json(hub.component_folder(card.folder, "scheduler") / "scheduler_config.json")
    name = name or ModelFacts.of(card).default_scheduler
    return folder_scheduler(config, name, card.scheduler, card.pipeline.scheduler_options)


class Pipeline(Parts, ABC):
    """Draws with the models of a folder that diffusers saved.

    The base of all kinds: `from_pretrained` returns one of the class that draws a folder. A further kind is a subclass
    with `_of_card` and `stream`, named by a row of `checkpoints.registry.PIPELINES`.
    """

    kinds: ClassVar[dict[str, type["Pipeline"]]] = {}  # the subclasses by name, once their modules are imported

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
        """A bundled name, a pipeline folder that diffusers saved, or a hub id; of the class that draws that folder.

        Args:
            device: auto takes a GPU where there is one.
            dtype: auto is float32 on the CPU and bfloat16 on a GPU.
            scheduler: a name such as ddim, ddpm, euler or euler-a (an unknown one is told all), made from the folder's
                scheduler config. Default: what the folder says.
            variant: of the weights' files, such as fp16.
            offload: each part waits in the host's memory and is on the GPU only while it works. Same pictures, less
                memory there, more time.
            precision: int8 keeps the weights of the denoiser and of text encoders in 8 bits: half the memory of 16, and
                an error, which `fastdiff verify MODEL --precision int8` measures. fp8 does too, and multiplies in 8
                bits, on a GPU of sm_89 or later.
            hub_options: `revision`, `token`, `local_files_only`.

        Raises InputError for whatever cannot be loaded, and for a folder that a class other than this one draws;
        NonFiniteError for NaN in the weights; OutOfMemoryError, which is Python's MemoryError and torch's
        OutOfMemoryError, and DeviceLostError where the GPU fails.
        """
        load = Load.of(  # before anything is downloaded for it
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
        """The pipeline of a model folder that was found and whose configs were read. Raises as `from_pretrained`."""
        kind = Pipeline.kinds[card.drawn_by]
        if not issubclass(kind, cls):
            raise InputError(f"{card.name}: a {kind.__name__} draws it; load it with Pipeline.from_pretrained")
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
        """The pipeline of a folder's models, which go by the names of their parts: unet, vae, text_encoder ..."""

    @abstractmethod
    def stream(self, **options: Any) -> Iterator[Step]:
        """Draw pictures and yield a Step after each step; the last one has what is finished.

        Every kind of pipeline takes these arguments. Each adds its own, and says which pictures there are.

        Args:
            num_inference_steps: default: the model's own, else 50, and all training steps for DDPM; this and all other
                defaults come from `requests.defaults`. A few samplers call the model more often.
            guidance_scale: 1 is unguided. Default: the model's own, else that of diffusers' pipeline, else 1.
            eta, use_clipped_model_output: of DDIM. Default: the model's own, else 0 and False.
            seed: 0 to 2^32 - 1, or a list of seeds.
            batch_size: the number of pictures, each with a seed of its own.
            height, width: pixels. Default: the model's sample_size.
            generator: torch draws all noise, in the order diffusers' pipelines draw, instead of `seed`; or a list with
                one for each picture.
            latents: (N, C, H, W) or (N, C, L), the starting noise, of the size that the denoiser works at.
            output_type: pil, np or pt. Default: the first.
            wait: for the GPU, whose queue has a few steps then, and for the pictures of the last one. If not, all steps
                are queued at once, and `Step.images` waits.

        Where memory runs out, pictures that have seeds go on half as many at a time, with the same bits: see
        `Step.at_once`. Pictures of a generator end with the error.

        Raises InputError naming what cannot be drawn, at once; NonFiniteError naming the step whose output is NaN or
        infinite; OutOfMemoryError, which is Python's MemoryError and torch's OutOfMemoryError, where not even one
        picture fits; DeviceLostError where the GPU fails.
        """

    def __call__(self, *, return_dict: bool = True, **options: Any) -> Any:
        """Draw pictures. Takes the options of `stream`, and returns what it ends with: a named tuple or a plain one.

        Where memory runs out it computes fewer of them at a time, and logs a warning.
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
        """Return the pictures of a call: every argument checked, every default filled in, and no noise drawn yet.

        counts: the number of pictures that each further argument gives. Raises InputError naming what cannot be drawn.
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
        """Return the options of sampling with every choice made."""
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
        """Return the conditions of pictures whose subjects are labels, or None for a picture that has none.

        Raises InputError for labels that the model does not have, and for guidance without a null label.
        """
        scale, config = drawing.sampling.guidance_scale, self.denoiser.config
        return choose_conditions(drawing.subjects, drawing.seeds, scale, config, self.info, self.device)

    def _shape(self, options: DrawingOptions) -> tuple[int, int, int]:
        """Return (C, H, W) of what the denoiser draws."""
        return picture_shape(self.denoiser.config, self.scale, options.height, options.width, options.latents)

    def _run(self, drawing: Drawing, steps: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Step]:
        """Yield a Step for each of the loop's; the last one has the pictures.

        If it should wait, the pictures are there, and a GPU has only a few steps in its queue.
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
                    steps.close()  # the denoiser has done its work, and may make room for the VAE
                    finish = self._begin_decoding(portions, extremes, x, drawing.output_type)
                timestep = schedule.timesteps[i].item()
                step = Step(i, len(schedule), timestep, x, x0, portions.size, finish, decoder, self._small)
                if drawing.wait:
                    pace.note()
                    _ = step.images
                yield step

    def _denoising(self, steps: Iterator[tuple[Tensor, Tensor]]) -> Generator[tuple[Tensor, Tensor]]:
        """Yield the steps of the loop, the denoiser being where it works."""
        with self._working(self.denoiser):
            yield from steps

    def _decode(self, portions: Portions, extremes: Extremes, x: Tensor, output_type: str) -> Any:
        """`decode` during a run: as many pictures at a time as fit, and an error names the step."""
        return self._begin_decoding(portions, extremes, x, output_type)()

    def _begin_decoding(self, portions: Portions, extremes: Extremes, x: Tensor, output_type: str) -> Callable[[], Any]:
        """Begin `_decode`; the function that is returned waits for the GPU."""
        with naming_lost_device():
            ends = portions.map(lambda part: self._begin_decode(x[part], output_type), len(x))

        def end() -> Any:
            with naming_lost_device(), extremes.naming_step():
                return join([end() for end in ends], output_type)

        return end

    def _schedule(self, sampling: Sampling) -> Schedule:
        schedule = self.scheduler.schedule(
            sampling.num_inference_steps,
            eta=sampling.eta,
            use_clipped_model_output=sampling.use_clipped_model_output,
        )
        channels = self.denoiser.config.sample_channels, self.denoiser.config.out_channels
        halves = (1, 2) if schedule.options.variance == "fixed" else (2,)
        if channels[1] not in [half * channels[0] for half in halves]:
            raise InputError(
                f"the model has {channels[0]} input and {channels[1]} output channels, which does not fit the "
                f"scheduler's {schedule.options.variance} variance; correct variance_type in its config"
            )
        return schedule.to(self.device)


def load_pipeline(card: ModelCard, request: Request, device: str, *, offload: bool = False) -> Pipeline:
    """The pipeline that draws a folder, with the scheduler that a request asks for. Raises as `Pipeline.from_card`."""
    load = Load.of(
        device=device,
        dtype=request.dtype,
        variant=request.variant,
        precision=request.precision,
        offload=offload,
        scheduler=request.scheduler,
    )
    return Pipeline.from_card(card, load)

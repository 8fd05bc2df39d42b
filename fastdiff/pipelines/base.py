"""BasePipeline, the base of all: loads the parts of a folder, and runs the denoising loop to pictures."""

import copy
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.arguments import instance, optional, text
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import SchedulerName
from fastdiff.diffusion.decoding import OutputType, begin_decode, check_channels, join
from fastdiff.diffusion.finite import Extremes
from fastdiff.diffusion.pictures import check_state
from fastdiff.diffusion.schedule import Schedule
from fastdiff.diffusion.schedulers import Scheduler, folder_scheduler, name_of, scheduler_like
from fastdiff.errors import InputError
from fastdiff.execution.devices import (
    check_move,
    check_precision,
    dtype_name,
    naming_lost_device,
    resolve_device,
    resolve_dtype,
)
from fastdiff.execution.memory import Portions, or_explain, remedies
from fastdiff.execution.offloading import on_card, rest_on_host
from fastdiff.execution.pace import Pace
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import DENOISERS, Models, load_models
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import Model
from fastdiff.pipelines.results import PipelineOutput, Step
from fastdiff.requests.defaults import PRECISION, ModelFacts, Sampling
from fastdiff.schema import checked

AnyPipeline = TypeVar("AnyPipeline", bound="BasePipeline")

PREVIEW_SIDE = 32  # of latents: those of a preview are averaged down to about it, so that decoding costs little

_log = logging.getLogger(__name__)


def scheduler_of(card: ModelCard, name: str | None) -> Scheduler:
    """Return the scheduler `name` of a model folder; for None the one that its pictures are drawn with by default.

    Raises InputError where the folder's scheduler config cannot be used.
    """
    config = read_json(hub.component_folder(card.folder, "scheduler") / "scheduler_config.json")
    name = name or ModelFacts.of(card).default_scheduler
    return folder_scheduler(config, name, card.scheduler, card.pipeline.scheduler_options)


class BasePipeline:
    """A denoiser, its scheduler, and whatever else draws with it. `stream` and the parts differ from class to class."""

    stream: Callable[..., Iterator[Step]]  # draws, and yields a Step after each step; the last has what is finished

    reads_text: ClassVar[bool] = False  # whether it draws from prompts
    _kinds: ClassVar[dict[bool, type["BasePipeline"]]] = {}  # by `reads_text`, what a folder is drawn with

    def __init_subclass__(cls) -> None:
        BasePipeline._kinds.setdefault(cls.reads_text, cls)

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
        self._card: torch.device | None = None  # where the models work, if they do not stay there

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        scheduler: str | None = None,
        variant: str | None = None,
        offload: bool = False,
        precision: Precision = PRECISION,
        **hub_options: Any,
    ) -> Any:
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

        Raises InputError for whatever cannot be loaded, NonFiniteError for NaN in the weights; OutOfMemoryError, which
        is Python's MemoryError and torch's OutOfMemoryError, and DeviceLostError where the GPU fails.
        """
        device = resolve_device(device)  # before anything is downloaded for it
        dtype = resolve_dtype(dtype, device)
        checked("scheduler", scheduler, SchedulerName | None)
        checked("precision", precision, Precision)
        check_precision(precision, device)
        folder = hub.resolve(name_or_path, variant=variant, **hub_options)
        if not (folder / "model_index.json").is_file():
            raise InputError(f"{folder} has no model_index.json; a pipeline folder also holds the model's scheduler")
        card = ModelCard.read(str(name_or_path), folder)
        options: dict[str, Any] = {"scheduler": scheduler, "variant": variant, "offload": offload}
        options["precision"] = precision
        pipe = cls.from_card(card, device=device, dtype=dtype, **options)
        if card.notice:
            _log.warning(card.notice)
        return pipe

    @classmethod
    def from_card(
        cls,
        card: ModelCard,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        scheduler: str | None = None,
        variant: str | None = None,
        offload: bool = False,
        precision: Precision = PRECISION,
    ) -> Any:
        """The pipeline of a model folder that was found and whose configs were read. As `from_pretrained` otherwise."""
        device = resolve_device(device)
        dtype = resolve_dtype(dtype, device)
        checked("scheduler", scheduler, SchedulerName | None)
        checked("precision", precision, Precision)
        check_precision(precision, device)
        if checked("offload", offload, bool) and device.type == "cpu":
            raise InputError("offload: there is no GPU whose memory it would save; leave it out")
        home = torch.device("cpu") if offload else device
        with naming_lost_device():
            models = or_explain(
                partial(load_models, card, device=home, dtype=dtype, variant=variant, precision=precision),
                f"{home}: out of memory for the weights of {card.name} in {dtype_name(dtype)}; "
                + remedies("end what else runs there", dtype),
            )
        pipe = cls._kinds[card.reads_text]._of_card(card, models, scheduler_of(card, scheduler))
        return pipe.offloaded_from(device) if offload else pipe

    @classmethod
    def _of_card(cls, card: ModelCard, models: Models, scheduler: Scheduler) -> "BasePipeline":
        """The pipeline of loaded models."""
        raise NotImplementedError

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        """One of ours, or diffusers' class of the same name, whose config is taken over."""
        self._scheduler = scheduler if isinstance(scheduler, Scheduler) else scheduler_like(scheduler)

    def with_scheduler(self: AnyPipeline, scheduler: Any) -> AnyPipeline:
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
        return self._card or self.denoiser.device

    @property
    def dtype(self) -> torch.dtype:
        return self.denoiser.dtype

    @property
    def models(self) -> tuple[Model, ...]:
        """The parts with weights."""
        return (self.denoiser, *(() if self.vae is None else (self.vae,)))

    def to(self: AnyPipeline, *args: Any, **kwargs: Any) -> AnyPipeline:
        """Move the models to a device or dtype, as torch's Module.to does. InputError where they cannot go there."""
        check_move(*args, **kwargs)
        if self._card is not None:
            raise InputError("to: an offloaded pipeline moves its parts itself; load it without offload to move it")
        for model in self.models:
            model.to(*args, **kwargs)
        return self

    def offloaded_from(self: AnyPipeline, card: torch.device) -> AnyPipeline:
        """Let the models, which are on the CPU, be on this GPU only while they work. Returns the pipeline itself."""
        for model in self.models:
            rest_on_host(model)
        self._card = card
        return self

    def _working(self, *models: Model | None) -> AbstractContextManager[None]:
        """Have models where they work during a block; nothing is done for those that stay there."""
        if self._card is None:
            return nullcontext()
        return on_card({model: model.release_graphs for model in models if model is not None}, self._card)

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

    def _call(self, options: Mapping[str, Any], return_dict: bool) -> Any:
        """Return what `stream` with these options ends with, as a named tuple or a plain one."""
        checked("return_dict", return_dict, bool)
        warned = False
        for step in self.stream(**options):
            output = step.trajectories or PipelineOutput(step.images)
            if step.notice and not warned:
                _log.warning(step.notice)
                warned = True
        return output if return_dict else tuple(output)

    def _run(
        self,
        steps: Iterator[tuple[Tensor, Tensor]],
        schedule: Schedule,
        portions: Portions,
        output_type: str,
        *,
        wait: bool = True,
    ) -> Iterator[Step]:
        """Yield a Step for each of the loop's; the last one has the pictures.

        If it should `wait`, the pictures are there, and a GPU has only a few steps in its queue.
        """
        extremes = Extremes(schedule, self.device)
        decoder, pace = partial(self._decode, portions, extremes), Pace(self.device)
        steps = self._denoising(steps)
        with naming_lost_device():
            for i, (x, x0) in enumerate(steps):
                extremes.note(i, x)
                finish = None
                if i == len(schedule) - 1:
                    steps.close()  # the denoiser has done its work, and may make room for the VAE
                    finish = self._begin_decoding(portions, extremes, x, output_type)
                timestep = schedule.timesteps[i].item()
                step = Step(i, len(schedule), timestep, x, x0, portions.size, finish, decoder, self._small)
                if wait:
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
        """Those of what is drawn."""
        return self.denoiser.config.sample_channels if self.vae is None else self.vae.config.out_channels

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

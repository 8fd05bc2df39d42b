"""The engine that all sessions share: models loaded once, the queue of runs, and the time limit."""

import contextlib
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fastdiff.arguments import naming
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import state_of
from fastdiff.checkpoints.single_files.ip_adapters import find_image_encoder, find_ip_adapter, image_encoder_weights
from fastdiff.errors import DeviceLostError, InputError, NonFiniteError
from fastdiff.execution.devices import resolve_device
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder_tiny import AutoencoderTiny
from fastdiff.models.clip_vision import CLIPVisionModelWithProjection
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.models.model import Model
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.adapting import Adapting
from fastdiff.pipelines.folders import scheduler_of
from fastdiff.pipelines.image_prompts import ImagePrompting
from fastdiff.requests.defaults import DEVICE, PAGE, PAGE_ON_CPU, PRECISION
from fastdiff.requests.file_option import FileOption, lora_names, weight_of
from fastdiff.requests.request import Request
from fastdiff.requests.styles import Styles
from fastdiff.runs.drawing import Progress, Run
from fastdiff.runs.option_files.controlnets import weights_of_controlnets
from fastdiff.ui.option_files.offered import OptionFiles
from fastdiff.ui.parts.catalogue import Catalogue
from fastdiff.ui.queueing.messages import PROBLEMS
from fastdiff.ui.queueing.queue import Queue

MAX_LOADED = 2  # models that stay in memory, and ControlNets: a comparison uses two
KEPT = 4  # LoRAs that stay in memory although the last run did not use them
_State = tuple[tuple[object, ...], ...]


class Engine:
    """The models of a catalogue, loaded on one device on demand. The most recently used ones stay in memory."""

    def __init__(
        self,
        folder: Path | None = None,
        allow_hub: bool = False,
        device: str = DEVICE,
        max_minutes: float | None = None,
        preview_vae: str | None = None,
        styles: Styles | None = None,
        files: OptionFiles | None = None,
    ) -> None:
        """folder, allow_hub, styles, files: passed to Catalogue. max_minutes: the limit of one request; None: no limit.
        preview_vae: the folder of an AutoencoderTiny, which decodes the previews of models with such latents.

        Raises InputError for a device that does not exist, and for a `preview_vae` that cannot be loaded.
        """
        self.device = resolve_device(device)
        self.preview_vae: AutoencoderTiny | None = None
        if preview_vae is not None:
            dtype = Load.of(device=self.device).dtype
            with naming("--preview-vae"):
                self.preview_vae = AutoencoderTiny.from_pretrained(preview_vae, device=self.device, dtype=dtype)
        own = PAGE_ON_CPU if self.device.type == "cpu" else PAGE
        self.catalogue = Catalogue(folder, allow_hub, own, styles, files)
        self._applier = Applier(self.catalogue.option_files)
        self._prompter = Prompter()
        self.budget = Budget(max_minutes)
        self.queue = Queue(PROBLEMS)
        self._loaded: OrderedDict[tuple[object, Precision], Pipeline] = OrderedDict()
        self._nets: OrderedDict[object, ControlNetModel] = OrderedDict()
        self._lock = threading.Lock()

    def pipeline(self, card: ModelCard, scheduler: str | None, precision: Precision = PRECISION) -> Pipeline:
        """Return a pipeline with its own `scheduler` around the model that all requests share."""
        pipe = self._load(card, precision).with_scheduler(scheduler_of(card, scheduler))
        if isinstance(pipe, ImagePrompting):
            pipe.unload_ip_adapter()  # the shared pipeline keeps it
        return pipe

    def pipeline_of(self, run: Run) -> Pipeline:
        """Return the pipeline of a run, with its ControlNet and its IP-Adapter.

        The model has the LoRAs and embeddings of the run until the next call.

        Raises as `Pipeline.from_card`, `Applier.apply`, `Prompter.apply` and `ControlNetModel.from_pretrained`.
        """
        pipe = self.pipeline(run.card, run.request.scheduler, run.request.precision)
        try:
            if run.request.ip_adapter:
                shared = self._load(run.card, run.request.precision)
                pipe = self._prompter.apply(shared, run.request).with_scheduler(pipe.scheduler)
            self._applier.apply(pipe, run.request)
            return self._controlled(pipe, run)
        except (InputError, NonFiniteError) as error:
            raise type(error)(self.catalogue.without_paths(str(error))) from None

    def warm_up(self, name: str) -> None:
        """Load a model and draw one step, so the first request finds the model ready."""
        with contextlib.suppress(MemoryError, DeviceLostError):  # the first run reports it to its user
            pipe = self.pipeline(self.catalogue.card(name), None)
            subject = {"prompt": ""} if pipe.reads_text else {"class_labels": 0 if pipe.info.labels else None}
            with self.queue.device:
                for _ in pipe.stream(num_inference_steps=1, **subject):
                    pass

    def _load(self, card: ModelCard, precision: Precision) -> Pipeline:
        key = state_of(card.file) if card.file else card.folder, precision
        with self._lock:
            if key not in self._loaded:
                while len(self._loaded) >= MAX_LOADED:
                    self._loaded.popitem(last=False)
                self._loaded[key] = self._with_previews(
                    Pipeline.from_card(card, Load.of(device=self.device, precision=precision))
                )
            self._loaded.move_to_end(key)
            return self._loaded[key]

    def _controlled(self, pipe: Pipeline, run: Run) -> Pipeline:
        """Return the pipeline with the ControlNet of a run, if it has one. The last ones stay in memory."""
        if not run.request.control:
            return pipe
        return pipe.with_parts(controlnet=self._controlnet(run.request, pipe.dtype))

    def _controlnet(self, request: Request, dtype: torch.dtype) -> ControlNetModel:
        (place,), (files,) = request.control, weights_of_controlnets(request)
        key = tuple(map(state_of, files)), dtype
        with self._lock:
            if key not in self._nets:
                while len(self._nets) >= MAX_LOADED:
                    self._nets.popitem(last=False)
                load = ControlNetModel.from_single_file if Path(place).is_file() else ControlNetModel.from_pretrained
                self._nets[key] = load(place, device=self.device, dtype=dtype)
            self._nets.move_to_end(key)
            return self._nets[key]

    def _with_previews(self, pipe: Pipeline) -> Pipeline:
        """Give a pipeline the `preview_vae`, if it decodes the pipeline's latents."""
        vae = self.preview_vae
        if vae is not None and pipe.vae is not None and pipe.vae.config.latent_channels == vae.config.latent_channels:
            pipe.preview_vae = vae
        return pipe


class Applier:
    """The LoRAs and embeddings that the last run has put into each model. The next run takes them out.

    The bits are the command's, which makes the same LoRAs part of the weights: both compute a weight and its changes in
    float32 and round once. Only one run draws at a time, so the model needs no copy.
    """

    def __init__(self, files: OptionFiles) -> None:
        self._files = files
        self._embeddings: WeakKeyDictionary[Model, _State] = WeakKeyDictionary()  # by the denoiser
        # by the denoiser and the name: the state of the file
        self._loras: WeakKeyDictionary[Model, dict[str, tuple[object, ...]]] = WeakKeyDictionary()

    def apply(self, pipe: Any, request: Request) -> None:
        """Give a pipeline the LoRAs and embeddings of a request alone.

        Raises InputError for a file that does not fit, and NonFiniteError for NaN. The model then has none.
        """
        try:
            self._use_embeddings(pipe, [FileOption.parse(text) for text in request.embedding])
            if isinstance(pipe, Adapting):
                self._use_loras(pipe, [FileOption.parse(text) for text in request.lora])
        except (InputError, NonFiniteError) as error:
            raise type(error)(self._files.without_paths(str(error), request)) from None

    def _use_embeddings(self, pipe: Any, options: Sequence[FileOption]) -> None:
        wanted = tuple((_state(option), option.value) for option in options)
        if self._embeddings.get(pipe.denoiser, ()) == wanted:
            return
        pipe.unload_textual_inversion()
        self._embeddings[pipe.denoiser] = ()
        if options:
            pipe.load_textual_inversion(
                [option.path for option in options], token=[str(option.value) for option in options]
            )
        self._embeddings[pipe.denoiser] = wanted

    def _use_loras(self, pipe: Adapting, options: Sequence[FileOption]) -> None:
        """Make these the active LoRAs, by their names in prompts. Those that are loaded are not read again."""
        names, states = lora_names(options), [_state(option) for option in options]
        known = self._loras.setdefault(pipe.denoiser, {})
        try:
            for name, state, option in zip(names, states, options, strict=True):
                if name in _loaded(pipe) and known.get(name) != state:
                    pipe.delete_adapters([name])
                if name not in _loaded(pipe):
                    pipe.load_lora_weights(option.path, adapter_name=name)
                    known[name] = state
            pipe.set_adapters(names, [weight_of(option) for option in options])
        except Exception:
            pipe.set_adapters([], [])
            raise
        unused = [name for name in _loaded(pipe) if name not in names]  # the first was loaded longest ago
        pipe.delete_adapters(unused[: max(0, len(unused) - KEPT)])


class Prompter:
    """Keeps the IP-Adapter and the image encoder of each model's last run in the model's shared pipeline."""

    def __init__(self) -> None:
        # by the denoiser: the states of the files of the image encoder, and of the IP-Adapter
        self._there: WeakKeyDictionary[Model, tuple[_State, _State]] = WeakKeyDictionary()

    def apply(self, shared: Any, request: Request) -> Any:
        """Return a copy of a shared pipeline with the IP-Adapter of a request. Loaded files are not read again.

        Raises InputError for a file that does not fit, and NonFiniteError for NaN. The shared pipeline then has none.
        """
        folder = find_image_encoder(request.ip_adapter[0], request.image_encoder)
        encoder = tuple(map(state_of, [*image_encoder_weights(folder), folder / "config.json"]))
        files = [find_ip_adapter(name) for name in request.ip_adapter]
        wanted = encoder, tuple(map(state_of, files))
        there = self._there.pop(shared.denoiser, ((), ()))
        if there != wanted:
            kept = shared.image_encoder if there[0] == encoder else None
            shared.unload_ip_adapter()
            where = {"dtype": shared.denoiser.dtype, "device": shared.denoiser.device}
            shared.image_encoder = kept or CLIPVisionModelWithProjection.from_pretrained(folder, **where)
            shared.load_ip_adapter(files)
        self._there[shared.denoiser] = wanted
        pipe = shared.with_scheduler(shared.scheduler)
        pipe.set_ip_adapter_scale([*request.ip_adapter_scale])
        return pipe


def _loaded(pipe: Pipeline) -> list[str]:
    """Return the names of the LoRAs in memory."""
    listed = pipe.get_list_adapters() if isinstance(pipe, Adapting) else {}
    return [*dict.fromkeys(name for names in listed.values() for name in names)]


def _state(option: FileOption) -> tuple[object, ...]:
    """Return what identifies a file until it changes. Raises OSError if it is gone."""
    return state_of(Path(option.path))


class Budget:
    """The time limit of a request. Its time is estimated as pictures x steps x the measured time of a step."""

    def __init__(self, minutes: float | None = None) -> None:
        """minutes: the most that a request may take; None for no limit."""
        self.minutes = minutes
        # seconds per step and picture, by what `_model` returns, and then by the picture's number of pixels
        self._seconds: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)

    def check(self, *runs: Run, spent: float = 0.0) -> None:
        """Raise InputError if `runs` are estimated to take too long.

        The estimate uses the slowest measured step of pictures that are as large or smaller.

        spent: the seconds that the request has already taken.
        """
        self._refuse_over(spent + sum(self._known_seconds(run) * _steps(run) for run in runs))

    def _known_seconds(self, run: Run) -> float:
        """Return the estimated seconds per step and picture, or 0 if nothing was measured."""
        known = [seconds for pixels, seconds in self._seconds[_model(run)].items() if pixels <= _pixels(run)]
        return max(known, default=0.0)

    def watch(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """Yield and time the steps of a run. Raises InputError once the estimate exceeds the limit."""
        fastest, before = math.inf, 0.0
        for count, progress in enumerate(steps, 1):
            fastest = min(fastest, (progress.seconds - before) / len(progress.places))
            before = progress.seconds
            yield progress
            if count > 1:  # the first step may also compile and load
                of_size = self._seconds[_model(progress.run)]
                of_size[_pixels(progress.run)] = min(fastest, of_size.get(_pixels(progress.run), math.inf))
                self._refuse_over(progress.seconds + fastest * _steps(progress.run) * (1 - progress.fraction))

    def _refuse_over(self, seconds: float) -> None:
        if self.minutes is not None and seconds > 60 * self.minutes:
            raise InputError(
                f"this would take about {_words(seconds)}, and the limit is {_words(60 * self.minutes)} per request; "
                "choose fewer pictures or steps, or a smaller size"
            )


def _model(run: Run) -> tuple[object, ...]:
    return run.card.source, run.request.precision, run.request.control, run.request.ip_adapter


def _pixels(run: Run) -> int:
    return math.prod(run.size or (1,))


def _steps(run: Run) -> int:
    """Return the total number of steps of all pictures."""
    return len(run.cells) * (run.request.num_inference_steps or 1)


def _words(seconds: float) -> str:
    count, unit = (seconds, "second") if seconds < 90 else (seconds / 60, "minute")
    return f"{round(count):,} {unit}{'' if round(count) == 1 else 's'}"

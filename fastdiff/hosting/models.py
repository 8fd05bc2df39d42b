"""Models: the models of a catalogue, loaded once for all requests."""

import contextlib
import copy
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fastdiff.arguments import naming
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import state_of
from fastdiff.errors import DeviceLostError, InputError, NonFiniteError
from fastdiff.execution.devices import resolve_device
from fastdiff.hosting.applying import Applier, Prompter
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.catalogue.offered import OptionFiles
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder_tiny import AutoencoderTiny
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.folders import scheduler_of
from fastdiff.pipelines.image_prompts import ImagePrompting
from fastdiff.requests.defaults import DEVICE, PAGE, PAGE_ON_CPU, PRECISION
from fastdiff.requests.request import Request
from fastdiff.requests.styles import Styles
from fastdiff.runs.drawing import Run
from fastdiff.runs.option_files.controlnets import weights_of_controlnets
from fastdiff.samplers.shared.scheduler import Scheduler

MAX_LOADED = 2  # models that stay in memory, and ControlNets: a comparison uses two


class Models:
    """The models of a catalogue, loaded on one device on demand. The most recently used ones stay in memory."""

    def __init__(
        self,
        folder: Path | None = None,
        allow_hub: bool = False,
        device: str = DEVICE,
        preview_vae: str | None = None,
        styles: Styles | None = None,
        files: OptionFiles | None = None,
        most: int = MAX_LOADED,
    ) -> None:
        """folder, allow_hub, styles, files: passed to Catalogue. preview_vae: the folder of an AutoencoderTiny, which
        decodes the previews of models with such latents. most: how many models stay in memory.

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
        self._most = most
        self._loaded: OrderedDict[tuple[object, Precision], Pipeline] = OrderedDict()
        self._nets: OrderedDict[object, ControlNetModel] = OrderedDict()
        self._schedulers: dict[
            tuple[object, str | None], tuple[ModelCard, Scheduler]
        ] = {}  # of the last card of a model
        self._in_use: Counter[tuple[object, Precision]] = Counter()
        self._lock = threading.Lock()

    def pipeline(self, card: ModelCard, scheduler: str | None, precision: Precision = PRECISION) -> Pipeline:
        """Return a pipeline with its own `scheduler` around the model that all requests share."""
        return _without_images(self._load(card, precision), self._scheduler(card, scheduler))

    @contextmanager
    def using(self, run: Run) -> Iterator[Pipeline]:
        """Keep the model of a run in memory during the block. Yields as `pipeline_of`."""
        key = _key(run.card, run.request.precision)
        with self._lock:
            self._in_use[key] += 1
        try:
            yield self.pipeline_of(run)
        finally:
            with self._lock:
                self._in_use -= Counter([key])

    def pipeline_of(self, run: Run) -> Pipeline:
        """Return the pipeline of a run, with its ControlNet and its IP-Adapter. `apply` gives the model the LoRAs.

        Raises as `Pipeline.from_card`, `Prompter.apply` and `ControlNetModel.from_pretrained`.
        """
        request, shared = run.request, self._load(run.card, run.request.precision)
        scheduler = self._scheduler(run.card, request.scheduler)
        try:
            if request.ip_adapter:
                pipe = self._prompter.apply(shared, request).with_scheduler(scheduler)
            else:
                pipe = _without_images(shared, scheduler)
            return self._controlled(pipe, run)
        except (InputError, NonFiniteError) as error:
            raise type(error)(self.catalogue.without_paths(str(error))) from None

    def apply(self, pipe: Pipeline, request: Request) -> None:
        """Give the model of a pipeline the LoRAs and embeddings of a request alone. Raises as `Applier.apply`."""
        self._applier.apply(pipe, request)

    def warm_up(self, name: str, call: Callable[[Pipeline, Callable[[], None]], object] | None = None) -> None:
        """Load a model and draw one step, so the first request finds the model ready.

        call: calls a function that draws with a pipeline; default: at once.
        """

        def step() -> None:
            subject = {"prompt": ""} if pipe.reads_text else {"class_labels": 0 if pipe.info.labels else None}
            for _ in pipe.stream(num_inference_steps=1, **subject):
                pass

        with contextlib.suppress(MemoryError, DeviceLostError):  # the first run reports it to its user
            pipe = self.pipeline(self.catalogue.card(name), None)
            step() if call is None else call(pipe, step)

    def _load(self, card: ModelCard, precision: Precision) -> Pipeline:
        key = _key(card, precision)
        with self._lock:
            if key not in self._loaded:
                while len(self._loaded) >= self._most:
                    unused = [each for each in self._loaded if not self._in_use[each]]
                    del self._loaded[(unused or [*self._loaded])[0]]
                self._loaded[key] = self._with_previews(
                    Pipeline.from_card(card, Load.of(device=self.device, precision=precision))
                )
            self._loaded.move_to_end(key)
            return self._loaded[key]

    def _scheduler(self, card: ModelCard, name: str | None) -> Scheduler:
        """Return a scheduler for a request. The files of one card are read once."""
        known, made = self._schedulers.get((card.source, name), (None, None))
        if known is not card or made is None:
            made = scheduler_of(card, name)
            self._schedulers[card.source, name] = card, made
        return copy.copy(made)

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


def _key(card: ModelCard, precision: Precision) -> tuple[object, Precision]:
    return state_of(card.file) if card.file else card.folder, precision


def _without_images(shared: Pipeline, scheduler: Scheduler) -> Pipeline:
    """Return a copy of a shared pipeline with its own scheduler and without an IP-Adapter."""
    pipe = shared.with_scheduler(scheduler)
    if isinstance(pipe, ImagePrompting):
        pipe.unload_ip_adapter()  # the shared pipeline keeps it
    return pipe

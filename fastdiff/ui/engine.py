"""The engine that all sessions share: models loaded once, the queue of runs, and the time limit."""

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path

from fastdiff.arguments import naming
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import state_of
from fastdiff.errors import DeviceLostError
from fastdiff.execution.devices import resolve_device
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder_tiny import AutoencoderTiny
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.folders import scheduler_of
from fastdiff.requests.defaults import DEVICE, PAGE, PAGE_ON_CPU, PRECISION
from fastdiff.requests.styles import Styles
from fastdiff.ui.budget import Budget
from fastdiff.ui.parts.catalogue import Catalogue
from fastdiff.ui.parts.messages import PROBLEMS
from fastdiff.ui.queueing.queue import Queue

MAX_LOADED = 2  # models that stay in memory: a comparison uses two


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
    ) -> None:
        """folder, allow_hub, styles: passed to Catalogue. max_minutes: the limit of one request; None for no limit.
        preview_vae: the folder of an AutoencoderTiny, which decodes the previews of models with such latents.

        Raises InputError for a device that does not exist, and for a `preview_vae` that cannot be loaded.
        """
        self.device = resolve_device(device)
        self.preview_vae: AutoencoderTiny | None = None
        if preview_vae is not None:
            dtype = Load.of(device=self.device).dtype
            with naming("--preview-vae"):
                self.preview_vae = AutoencoderTiny.from_pretrained(preview_vae, device=self.device, dtype=dtype)
        self.catalogue = Catalogue(folder, allow_hub, PAGE_ON_CPU if self.device.type == "cpu" else PAGE, styles)
        self.budget = Budget(max_minutes)
        self.queue = Queue(PROBLEMS)
        self._loaded: OrderedDict[tuple[object, Precision], Pipeline] = OrderedDict()
        self._lock = threading.Lock()

    def pipeline(self, card: ModelCard, scheduler: str | None, precision: Precision = PRECISION) -> Pipeline:
        """Return a pipeline with its own `scheduler` around the model that all requests share."""
        shared = self._load(card, precision)
        return shared.with_scheduler(scheduler_of(card, scheduler))

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

    def _with_previews(self, pipe: Pipeline) -> Pipeline:
        """Give a pipeline the `preview_vae`, if it decodes the pipeline's latents."""
        vae = self.preview_vae
        if vae is not None and pipe.vae is not None and pipe.vae.config.latent_channels == vae.config.latent_channels:
            pipe.preview_vae = vae
        return pipe

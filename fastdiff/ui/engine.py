"""The engine that all visits share: models loaded once, steps computed one at a time, and the time for a request."""

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path

from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import DeviceLostError
from fastdiff.execution.devices import resolve_device
from fastdiff.kinds import Precision
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.base import scheduler_of
from fastdiff.requests.defaults import DEVICE, PAGE, PAGE_ON_CPU, PRECISION
from fastdiff.ui.budget import Budget
from fastdiff.ui.parts.catalogue import Catalogue
from fastdiff.ui.parts.running import Turns

MAX_LOADED = 2  # models that stay in memory: a comparison uses two


class Engine:
    """The models of a catalogue, loaded on one device as they are asked for; the last ones used stay in memory."""

    def __init__(
        self,
        folder: Path | None = None,
        allow_hub: bool = False,
        device: str = DEVICE,
        max_minutes: float | None = None,
    ) -> None:
        """folder, allow_hub: of the Catalogue. max_minutes: of one request; None: as many as it takes.

        Raises InputError for a folder or a device that is not there.
        """
        self.device = resolve_device(device)
        self.catalogue = Catalogue(folder, allow_hub, PAGE_ON_CPU if self.device.type == "cpu" else PAGE)
        self.budget = Budget(max_minutes)
        self.turns = Turns()
        self._loaded: OrderedDict[tuple[Path, Precision], Pipeline] = OrderedDict()
        self._lock = threading.Lock()

    def pipeline(self, card: ModelCard, scheduler: str | None, precision: Precision = PRECISION) -> Pipeline:
        """A pipeline with a `scheduler` of its own around the model that all requests share."""
        shared = self._load(card, precision)
        return shared.with_scheduler(scheduler_of(card, scheduler))

    def warm_up(self, name: str) -> None:
        """Load a model and draw one step, so that the first picture comes at once."""
        with contextlib.suppress(MemoryError, DeviceLostError):  # the first run says so, to whom it concerns
            pipe = self.pipeline(self.catalogue.card(name), None)
            subject = {"prompt": ""} if pipe.reads_text else {"class_labels": 0 if pipe.info.labels else None}
            for _ in self.turns.take(pipe.stream(num_inference_steps=1, **subject)):
                pass

    def _load(self, card: ModelCard, precision: Precision) -> Pipeline:
        key = card.folder, precision
        with self._lock:
            if key not in self._loaded:
                while len(self._loaded) >= MAX_LOADED:
                    self._loaded.popitem(last=False)
                self._loaded[key] = Pipeline.from_card(card, Load.of(device=self.device, precision=precision))
            self._loaded.move_to_end(key)
            return self._loaded[key]

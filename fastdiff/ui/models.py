"""The models that the page offers: where they come from, and each loaded once for everybody."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from fastdiff.checkpoints import hub, registry
from fastdiff.diffusion.schedulers import scheduler_from_config
from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.pipeline import Pipeline
from fastdiff.requests.request import DEFAULT_STEPS, ModelCard

MAX_DEPTH = 3  # folders below the models folder
MAX_LOADED = 2  # models that stay in memory: a comparison uses two
CPU_STEPS = 20  # on a CPU a first picture should come within seconds


class Models:
    """The bundled models, those below `folder` (named ./path), and with `allow_hub` those of the Hugging Face hub."""

    def __init__(self, folder: Path | None = None, allow_hub: bool = False, device: str = "auto"):
        """Raises InputError for a folder or a device that is not there."""
        if folder is not None and not folder.is_dir():
            raise InputError(f"--models-dir {folder} is not a folder; name the one that holds your model folders")
        self.folder = None if folder is None else folder.resolve()
        self.allow_hub = allow_hub
        self.device = resolve_device(device)
        self._loaded: OrderedDict[Path, Pipeline] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The models that can be drawn with and need no download."""
        folders = self._folders()
        return [name for name, folder in folders.items() if _is_drawable(name, folder)]

    def card(self, name: str) -> ModelCard:
        """What the JSON files of model `name` say. A hub model is downloaded where the hub is allowed.

        Raises InputError for a name that is not on offer, and for a model that fastdiff does not draw with.
        """
        folder = self._folders().get(name) if isinstance(name, str) else None
        if folder is None and self.allow_hub and isinstance(name, str) and hub.is_hub_id(name):
            folder = hub.resolve(name)
        if folder is None:
            hint = "or a hub id org/name" if self.allow_hub else "hub ids need the server's option --allow-hub"
            raise InputError(f"model {str(name)[:80]!r} is not here; choose one of {', '.join(self.names())}; {hint}")
        return _read_card(name, folder)

    def pipeline(self, card: ModelCard, scheduler: str | None) -> Pipeline:
        """A pipeline with a `scheduler` of its own around the model that all requests share."""
        shared = self._load(card.folder)
        own = scheduler_from_config(shared.scheduler.config, scheduler)
        return Pipeline(shared.denoiser, own, shared.info, card.name, shared.vae)

    def warm_up(self, name: str) -> None:
        """Load a model and draw one step, so that the first picture comes at once."""
        pipe = self.pipeline(self.card(name), None)
        for _ in pipe.stream(num_inference_steps=1, class_labels=0 if pipe.info.labels else None):
            pass

    def default_steps(self, card: ModelCard) -> int:
        """The model's own number of steps, or fewer on a CPU."""
        own = min(card.info.num_inference_steps or DEFAULT_STEPS, card.num_train_timesteps)
        return min(own, CPU_STEPS) if self.device.type == "cpu" else own

    def default_batch_size(self) -> int:
        return 2 if self.device.type == "cpu" else 16

    def _load(self, folder: Path) -> Pipeline:
        with self._lock:
            if folder not in self._loaded:
                while len(self._loaded) >= MAX_LOADED:
                    self._loaded.popitem(last=False)
                self._loaded[folder] = Pipeline.from_pretrained(folder, device=self.device)
            self._loaded.move_to_end(folder)
            return self._loaded[folder]

    def _folders(self) -> dict[str, Path]:
        local = {} if self.folder is None else _model_folders(self.folder)
        return hub.bundled_models() | local | (hub.cached_models() if self.allow_hub else {})


def _read_card(name: str, folder: Path) -> ModelCard:
    card = ModelCard.read(name, folder)
    if card.config.class_embed_type is not None:
        raise InputError(f"model {name}: the page has no control for class_embed_type {card.config.class_embed_type}")
    return card


def _is_drawable(name: str, folder: Path) -> bool:
    try:
        _read_card(name, folder)
    except InputError:
        return False
    return True


def _model_folders(root: Path) -> dict[str, Path]:
    folders = (folder for folder in _walk(root, MAX_DEPTH) if _stays_inside(folder, root))
    return {f"./{folder.relative_to(root).as_posix()}": folder for folder in folders}


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    """The pipeline folders at most `depth` levels below `folder`; what a model folder holds is not searched."""
    for child in sorted(folder.iterdir()) if depth else ():
        if (child / "model_index.json").is_file():
            yield child
        elif child.is_dir():
            yield from _walk(child, depth - 1)


def _stays_inside(folder: Path, root: Path) -> bool:
    """Whether every file that loading `folder` may read lies below `root`, once all links are followed."""
    parts = [folder, *(hub.component_folder(folder, name) for name in registry.PART_NAMES)]
    paths = [path for part in parts for path in (part, *part.iterdir())]
    return all(path.resolve().is_relative_to(root) for path in paths)

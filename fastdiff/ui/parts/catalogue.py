"""The models that the page offers: where they are, which may be read, and their default settings."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from fastdiff.checkpoints import hub, registry
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError, in_one_line
from fastdiff.requests.defaults import PAGE, Defaults, ModelFacts, Sampling, SamplingOptions, complete_sampling
from fastdiff.requests.styles import Styles
from fastdiff.text.tokenizer import CLIPTokenizer

MAX_DEPTH = 3  # folders below the models folder


class Catalogue:
    """Bundled models, models below `folder` (named ./path), and with `allow_hub` models of the Hugging Face Hub."""

    def __init__(
        self,
        folder: Path | None = None,
        allow_hub: bool = False,
        defaults: Defaults = PAGE,
        styles: Styles | None = None,
    ) -> None:
        """defaults: settings that a request leaves open. styles: styles on offer for prompts.

        Raises InputError for a folder that does not exist.
        """
        if folder is not None and not folder.is_dir():
            raise InputError(f"--models-dir {folder} is not a folder; give the folder that contains your model folders")
        self.folder = None if folder is None else folder.resolve()
        self.allow_hub = allow_hub
        self.defaults = defaults
        self.styles = styles or Styles()
        self._tokenizers: dict[Path, tuple[CLIPTokenizer, ...]] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of the usable models that need no download."""
        return [card.name for card in self.cards()]

    def cards(self) -> list[ModelCard]:
        """Return the cards of the usable models that need no download."""
        cards, _ = self._read_all()
        return cards

    def left_out(self) -> dict[str, str]:
        """Return why each unusable model is left out, by name."""
        _, left_out = self._read_all()
        return left_out

    def card(self, name: str) -> ModelCard:
        """Return the card of model `name`. A hub model is downloaded if the hub is allowed.

        Raises InputError for an unknown name, and for a model that the page does not support.
        """
        folder = self._folders().get(name) if isinstance(name, str) else None
        if folder is None and self.allow_hub and isinstance(name, str) and hub.is_hub_id(name):
            folder = hub.resolve(name)
        if folder is None:
            hint = "or a hub id (org/name)" if self.allow_hub else "hub ids need the server option --allow-hub"
            raise InputError(f"model {str(name)[:80]!r} is unknown; choose one of {', '.join(self.names())}; {hint}")
        return _read_card(name, folder)

    def tokenizers(self, card: ModelCard) -> tuple[CLIPTokenizer, ...]:
        """Return the tokenizers of a model that reads text. They are cached. Raises InputError for invalid files."""
        with self._lock:
            if card.folder not in self._tokenizers:
                self._tokenizers[card.folder] = tuple(
                    CLIPTokenizer(card.folder / part.name) for part in card.tokenizers
                )
            return self._tokenizers[card.folder]

    def default_sampling(self, card: ModelCard, scheduler: str | None = None) -> Sampling:
        """Return the default options of `card` with `scheduler`, or with the model's own scheduler."""
        asked = SamplingOptions(scheduler=scheduler)
        return complete_sampling(asked, ModelFacts.of(card), self.defaults, labelled=bool(card.labels))

    def _folders(self) -> dict[str, Path]:
        folders, _ = self._search()
        return folders

    def _search(self) -> tuple[dict[str, Path], dict[str, str]]:
        """Return the folders of the models on offer, by name, and why others must not be read."""
        local, refused = ({}, {}) if self.folder is None else _model_folders(self.folder)
        return hub.bundled_models() | local | (hub.cached_models() if self.allow_hub else {}), refused

    def _read_all(self) -> tuple[list[ModelCard], dict[str, str]]:
        """Return the cards of the usable models, and why others have none. A broken model does not affect others."""
        folders, left_out = self._search()
        cards = []
        for name, folder in folders.items():
            try:
                cards.append(_read_card(name, folder))
            except InputError as error:
                left_out[name] = str(error)
        return cards, left_out


def _read_card(name: str, folder: Path) -> ModelCard:
    try:
        card = ModelCard.read(name, folder)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"model {name} cannot be read ({in_one_line(error)}); save it again") from None
    if card.config.of_trajectories:
        raise InputError(f"model {name}: it plans trajectories, but the page draws pictures; use fastdiff sample")
    if card.reads_text and not card.tokenizers:
        raise InputError(f"model {name}: it has no text encoder, so the page cannot give it a prompt; use Python")
    if card.config.class_embed_type is not None:
        raise InputError(f"model {name}: the page has no control for class_embed_type {card.config.class_embed_type}")
    return card


def _model_folders(root: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the model folders below `root`, by name, and folders that must not be read, with the reason."""
    folders: dict[str, Path] = {}
    refused: dict[str, str] = {}
    for folder in _walk(root, MAX_DEPTH):
        name, reason = f"./{folder.relative_to(root).as_posix()}", _refusal(folder, root)
        if reason is None:
            folders[name] = folder
        else:
            refused[name] = reason
    return folders, refused


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the pipeline folders at most `depth` levels below `folder`, without searching inside them.

    Folders and links that cannot be followed are included; `_refusal` gives the reason.
    """
    try:
        children = sorted(folder.iterdir())
        os.stat(os.path.join(folder, "."))  # it may be readable but not searchable
    except OSError:
        yield folder
        return
    for child in children:
        is_dangling = os.path.islink(child) and not os.path.exists(child)
        if is_dangling or os.path.lexists(child / "model_index.json"):
            yield child
        elif os.path.isdir(child) and depth > 1:
            yield from _walk(child, depth - 1)


def _refusal(folder: Path, root: Path) -> str | None:
    """Return why `folder` must not be read, or None if it may be.

    Every file that loading may read must be below `root` after all links are followed, and must be a regular file,
    because reading another kind may never end.
    """
    try:
        str(folder).encode()
        parts = [folder, *(hub.component_folder(folder, name) for name in registry.part_names())]
        paths = [path for part in parts for path in (part, *part.iterdir())]
        outside = [path for path in paths if not path.resolve().is_relative_to(root)]
        strange = [path for path in paths if path.exists() and not (path.is_file() or path.is_dir())]
    except UnicodeEncodeError:
        return "its name is not UTF-8; rename it"
    except OSError as error:
        return f"{error.filename}: {error.strerror}; fix or remove it"
    except RuntimeError as error:  # circular links
        return in_one_line(error)
    if outside:
        return f"the link {outside[0].relative_to(root)} points outside {root}; replace it with a copy"
    return f"{strange[0].relative_to(root)} is not a regular file; remove it" if strange else None

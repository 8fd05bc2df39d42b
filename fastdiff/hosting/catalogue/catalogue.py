"""The models on offer: where they are, which may be read, and their default settings."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from fastdiff.checkpoints import hub, registry
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import state_of
from fastdiff.checkpoints.registry import IMAGE_ENCODER
from fastdiff.checkpoints.single_files.cards import file_card
from fastdiff.checkpoints.single_files.embeddings import Embedding
from fastdiff.checkpoints.single_files.listing import MAX_DEPTH, cached_models, find_models
from fastdiff.checkpoints.single_files.reading import is_single_file
from fastdiff.errors import InputError, in_one_line
from fastdiff.hosting.catalogue.controlnets import ControlNets
from fastdiff.hosting.catalogue.ip_adapters import IPAdapters
from fastdiff.hosting.catalogue.offered import OptionFiles
from fastdiff.requests.defaults import PAGE, Defaults, ModelFacts, Sampling, SamplingOptions, complete_sampling
from fastdiff.requests.file_option import FileOption
from fastdiff.requests.request import Request
from fastdiff.requests.styles import Styles
from fastdiff.text.loading import Tokenizer, load_tokenizer
from fastdiff.text.tokenizer import CLIPTokenizer

_CONTROLNET, _SAVED = registry.CONTROLNET.class_name, "diffusion_pytorch_model."


class Catalogue:
    """Bundled models, models below `folder` (named ./path), and with `allow_hub` models of the Hugging Face Hub.

    A model below `folder` is a folder in diffusers' layout or a single file.
    """

    def __init__(
        self,
        folder: Path | None = None,
        allow_hub: bool = False,
        defaults: Defaults = PAGE,
        styles: Styles | None = None,
        files: OptionFiles | None = None,
    ) -> None:
        """defaults: settings that a request leaves open. styles: styles on offer for prompts. files: the LoRAs and
        embeddings on offer.
        """
        self.folder = None if folder is None else folder.resolve()
        self.allow_hub = allow_hub
        self.defaults = defaults
        self.styles = styles or Styles()
        self.option_files = files or OptionFiles()
        self.controlnets = ControlNets(self._control_places, allow_hub=allow_hub)
        self.ip_adapters = IPAdapters(self._single_files, self._encoder_places, allow_hub=allow_hub)
        self._tokenizers: dict[Path, tuple[Tokenizer, ...]] = {}
        self._files = _FileCards()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of the usable models that need no download."""
        return [card.name for card in self.cards()]

    def cards(self) -> list[ModelCard]:
        """Return the cards of the usable models that need no download."""
        cards, _ = self._read_all()
        return cards

    def left_out(self) -> dict[str, str]:
        """Return why each unusable model is left out, by name. An IP-Adapter is named if no model can use it."""
        _, left_out = self._read_all()
        ip_adapters, known = self.ip_adapters.reasons(), self.controlnets.names()
        known |= {name for name, reason in ip_adapters.items() if reason is None}
        known |= {name for name in left_out if PurePosixPath(name).parent.name == IMAGE_ENCODER.name}
        return {name: ip_adapters.get(name) or reason for name, reason in left_out.items() if name not in known}

    def card(self, name: str) -> ModelCard:
        """Return the card of model `name`. A hub model is downloaded if the hub is allowed.

        Raises InputError for an unknown name, and for a model that the page does not support.
        """
        place = self._places().get(name) if isinstance(name, str) else None
        if place is None and self.allow_hub and isinstance(name, str) and hub.is_hub_id(name):
            place = hub.resolve(name)
        if place is None:
            hint = "or a hub id (org/name)" if self.allow_hub else "hub ids need the server option --allow-hub"
            raise InputError(f"model {str(name)[:80]!r} is unknown; choose one of {', '.join(self.names())}; {hint}")
        return self._read(name, place)

    def tokenizers(self, card: ModelCard) -> tuple[Tokenizer, ...]:
        """Return the tokenizers of a model that reads text, which know the embeddings on offer. They are cached.

        Raises InputError for invalid files.
        """
        embeddings = self.option_files.embeddings(card)
        with self._lock:
            if card.folder not in self._tokenizers:
                self._tokenizers[card.folder] = tuple(load_tokenizer(part, card.folder) for part in card.tokenizers)
            tokenizers = self._tokenizers[card.folder]
            for i, tokenizer in enumerate(tokenizers):
                if isinstance(tokenizer, CLIPTokenizer):
                    _teach(tokenizer, {name: each for name, (_, each) in embeddings.items() if i in each.tensors})
            return tokenizers

    def embeddings_in(self, card: ModelCard, *texts: str | None, is_whole: bool = False) -> tuple[str, ...]:
        """Return the embeddings whose tokens are in the prompts of a request, each as PATH:TOKEN.

        is_whole: whether the model reads all of the prompts.
        """
        offered = self.option_files.embeddings(card)
        if not offered:
            return ()
        used = {
            token
            for tokenizer in self.tokenizers(card)
            if isinstance(tokenizer, CLIPTokenizer)
            for text in filter(None, texts)
            for token in tokenizer.embeddings_in(text, is_whole=is_whole)
        }
        return tuple(str(FileOption(str(path), name)) for name, (path, _) in offered.items() if name in used)

    def default_sampling(self, card: ModelCard, scheduler: str | None = None, *, masked: bool = False) -> Sampling:
        """Return the default options of `card` with `scheduler`, or with the model's own scheduler.

        masked: for a start picture with a mask.
        """
        asked = SamplingOptions(scheduler=scheduler)
        return complete_sampling(asked, ModelFacts.of(card), self.defaults, labelled=bool(card.labels), masked=masked)

    def with_names(self, request: Request) -> Request:
        """Return a request of the page with its files by their names, as its PNG stores them."""
        return self.option_files.with_names(self.controlnets.with_names(self.ip_adapters.with_names(request)))

    def record_with_names(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a picture, with its files by name."""
        named = self.controlnets.record_with_names(self.ip_adapters.record_with_names(record))
        return self.option_files.record_with_names(named)

    def without_paths(self, text: str) -> str:
        """Return an error's text with names instead of the paths of ControlNets, IP-Adapters and image encoders."""
        return self.ip_adapters.without_paths(self.controlnets.without_paths(text))

    def _control_places(self) -> dict[str, Path]:
        """Return the folders of ControlNets, and the files that may be ControlNets, by name."""
        local = {} if self.folder is None else _controlnets_below(self.folder)
        return hub.bundled_controlnets() | local

    def _single_files(self) -> dict[str, Path]:
        """Return the single files below the folder, by name, except what must not be read."""
        return {} if self.folder is None else _single_files_below(self.folder)

    def _encoder_places(self, file: Path) -> Iterator[tuple[str, Path]]:
        """Yield the name and the folder of each image encoder that an IP-Adapter may use, the one beside it first."""
        root, beside = self.folder, file.parent / IMAGE_ENCODER.name
        if root is None or not file.is_relative_to(root):  # of the hub
            yield beside.name, beside
        if root is None:
            return
        others = (folder for folder in _encoders_below(root) if folder != beside)
        for folder in chain([beside], others):
            if (folder / "config.json").is_file() and folder.is_relative_to(root) and _refusal(folder, root) is None:
                yield f"./{folder.relative_to(root).as_posix()}", folder

    def _places(self) -> dict[str, Path]:
        places, _ = self._search()
        return places

    def _search(self) -> tuple[dict[str, Path], dict[str, str]]:
        """Return the folders and files of the models on offer, by name, and why others must not be read."""
        local, refused = ({}, {}) if self.folder is None else _places_below(self.folder)
        return hub.bundled_models() | local | (cached_models() if self.allow_hub else {}), refused

    def _read_all(self) -> tuple[list[ModelCard], dict[str, str]]:
        """Return the cards of the usable models, and why others have none. A broken model does not affect others."""
        places, left_out = self._search()
        cards = []
        for name, place in places.items():
            try:
                cards.append(self._read(name, place))
            except InputError as error:
                left_out[name] = str(error)
        return cards, left_out

    def _read(self, name: str, place: Path) -> ModelCard:
        return self._files.read(name, place) if is_single_file(place) else _read_card(name, place, ModelCard.read)


def _teach(tokenizer: CLIPTokenizer, embeddings: Mapping[str, Embedding]) -> None:
    """Let a tokenizer know the tokens of embeddings. A token that it cannot know stays text."""
    known: dict[str, int] = {}
    for token, embedding in embeddings.items():
        with contextlib.suppress(InputError):
            tokenizer.check_token(token, embedding.vectors, known)
            known[token] = embedding.vectors
    if known != tokenizer.embeddings:
        tokenizer.use(tokenizer.with_embeddings(known))


class _FileCards:
    """The cards of single files. A header is read again only when its file changes: many files have megabytes of it."""

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], ModelCard | InputError] = {}

    def read(self, name: str, path: Path) -> ModelCard:
        """Return the card of a file. Raises InputError if the page cannot draw with it."""
        try:
            key = name, *state_of(path)
        except OSError as error:
            raise InputError(f"{name} cannot be read ({error.strerror}); fix or remove it") from None
        if key not in self._read:
            try:
                self._read[key] = _read_card(name, path, _file_card)
            except InputError as error:
                self._read[key] = InputError(str(error).replace(str(path), name))
        found = self._read[key]
        if isinstance(found, InputError):
            raise InputError(str(found))
        return found


def _file_card(name: str, path: Path) -> ModelCard:
    return file_card(path, name=name)


def _read_card(name: str, place: Path, read: Callable[[str, Path], ModelCard]) -> ModelCard:
    try:
        card = read(name, place)
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


def _places_below(root: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the model folders and single files below `root`, by name, and why others must not be read."""
    places: dict[str, Path] = {}
    refused: dict[str, str] = {}
    for place in find_models(root):
        name, reason = f"./{place.relative_to(root).as_posix()}", _refusal(place, root)
        if _is_of_controlnet(place):
            continue
        if reason is None:
            places[name] = place
        else:
            refused[name] = reason
    return places, refused


def _controlnets_below(root: Path) -> dict[str, Path]:
    """Return the folders of ControlNets and all single files below `root`, by name, except what must not be read."""
    files = _single_files_below(root).values()
    places = dict.fromkeys(place.parent if _is_of_controlnet(place) else place for place in files)
    return {f"./{each.relative_to(root).as_posix()}": each for each in places if _refusal(each, root) is None}


def _single_files_below(root: Path) -> dict[str, Path]:
    """Return the single files below `root`, by name, except files whose names are not UTF-8."""
    files = [place for place in find_models(root) if is_single_file(place) and _refusal(place, root) is None]
    return {f"./{place.relative_to(root).as_posix()}": place for place in files}


def _encoders_below(root: Path) -> Iterator[Path]:
    """Yield the folders below `root` that have the name of an image encoder's, sorted, the upper ones first."""
    for depth in range(MAX_DEPTH + 1):
        yield from sorted(root.glob("*/" * depth + IMAGE_ENCODER.name))


def _is_of_controlnet(place: Path) -> bool:
    """Return whether a file has the weights of a ControlNet's folder, as diffusers saves it."""
    config = place.parent / "config.json"
    if not (place.name.startswith(_SAVED) and is_single_file(place) and config.is_file()):
        return False
    try:
        return read_json(config).get("_class_name") == _CONTROLNET
    except (InputError, OSError):
        return False


def _refusal(place: Path, root: Path) -> str | None:
    """Return why a folder or a single file must not be read, or None if it may be.

    Every file of a folder that loading may read must be below `root` after all links are followed, and must be a
    regular file, because reading another kind may never end. A single file may be a link to anywhere:
    `read_single_file` takes regular files alone, and nothing but the tensors of a model is read.
    """
    try:
        str(place).encode()
        if is_single_file(place):
            return None
        parts = [place, *(hub.component_folder(place, name) for name in registry.part_names())]
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

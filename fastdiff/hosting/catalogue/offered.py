"""The LoRAs and embeddings on offer: files of two folders, by their names there. Only headers are read.

A user gives names alone. A name that is not in the list opens no file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastdiff.arguments import did_you_mean, shown
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import begin_known, known_hash, state_of
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.embeddings import Embedding, if_embedding
from fastdiff.checkpoints.single_files.listing import find_models, last_part
from fastdiff.checkpoints.single_files.reading import has_model_suffix, read_single_file
from fastdiff.errors import InputError
from fastdiff.requests.file_option import FileOption, lora_name, weight_of
from fastdiff.requests.request import OPTION_FILES, Request
from fastdiff.requests.syntax import Tag, split_loras, without_loras

LORA, EMBEDDING = "lora", "embedding"  # settings
MAX_LORAS = 8  # of a picture
T = TypeVar("T")


@dataclass(frozen=True)
class LoraHeader:
    """The header of a LoRA."""

    text_width: int | None  # of the text that its model reads; None: it cannot be told
    is_of_captions: bool  # whether it is of Z-Image

    def fits(self, card: ModelCard) -> bool:
        """Return whether a LoRA fits a model. One of text encoders alone fits every model of Stable Diffusion."""
        if card.reads_captions or self.is_of_captions:
            return card.reads_captions and self.is_of_captions
        return self.text_width in (None, getattr(card.config, "text_width", None))


class _Folder(Generic[T]):
    """The files of one kind in a folder. A header is read again only when its file changes."""

    def __init__(self, folder: Path | None, setting: str, read: Callable[[Path], T | None]) -> None:
        """read: returns what a header says, or None for a file of another kind."""
        if folder is not None and not folder.is_dir():
            raise InputError(f"--{setting}-dir: {folder} is not a folder; give the folder of your files")
        self.folder = folder
        self._read_header = read
        self._read: dict[tuple[object, ...], T | None] = {}

    def files(self) -> dict[str, tuple[Path, T]]:
        """Return the path and the header of each file of this kind, by its name."""
        found = {}
        for path in () if self.folder is None else find_models(self.folder):
            header = self._header(path) if has_model_suffix(path.name) and path.is_file() else None
            if header is not None:
                found[path.relative_to(self.folder or path).as_posix()] = path, header
        return {name: each for name, each in found.items() if FileOption.parse(name).value is None}

    def _header(self, path: Path) -> T | None:
        try:
            str(path).encode()
            key = state_of(path)
            if key not in self._read:
                self._read[key] = self._read_header(path)
            return self._read[key]
        except (OSError, UnicodeEncodeError):  # it is gone, or its name cannot be shown
            return None


class OptionFiles:
    """The LoRAs below one folder, and the embeddings below another one."""

    def __init__(self, lora_dir: Path | None = None, embedding_dir: Path | None = None) -> None:
        """Raises InputError for what is not a folder."""
        self._loras = _Folder(lora_dir, LORA, _lora_header)
        self._embeddings = _Folder(embedding_dir, EMBEDDING, if_embedding)

    def loras(self, card: ModelCard) -> dict[str, Path]:
        """Return the LoRAs that fit a model, by name."""
        files = self._loras.files() if card.reads_text else {}
        return {name: path for name, (path, header) in files.items() if header.fits(card)}

    def chosen_loras(self, asked: Sequence[str], card: ModelCard, tags: Sequence[Tag] = ()) -> tuple[str, ...]:
        """Return the LoRAs of NAME or NAME:WEIGHT, and then of a prompt's `tags`, as PATH:WEIGHT.

        A LoRA of the prompt alone has the weight 0, which the prompt's replaces.

        Raises InputError for a name that is not on offer for the model, for a name given twice, for a weight that is no
        number, and for more than MAX_LORAS.
        """
        offered, found = self.loras(card) if asked or tags else {}, {}
        for option in map(FileOption.parse, asked):
            if option.path not in offered:
                some = f"one of {', '.join([*offered][:MAX_LORAS])}" if offered else "none: the server offers none"
                raise InputError(f"lora: {shown(option.path)} is not on offer for {card.name}; choose {some}")
            if option.path in found:
                raise InputError(f"lora: {option.path} is given twice; give it once, with the sum of the weights")
            found[option.path] = f"{offered[option.path]}:{weight_of(option):g}"
        for tag in tags:
            name = _tagged(tag, [*found], offered, card)
            found.setdefault(name, f"{offered[name]}:0")
        if len(found) > MAX_LORAS:
            raise InputError(f"lora: {len(found)} with those of the prompt; use up to {MAX_LORAS}")
        return tuple(found.values())

    def without_missing(self, prompt: str, card: ModelCard) -> tuple[str, list[str]]:
        """Return a weighted prompt without the tags of LoRAs that are not here, and the names of these LoRAs."""
        try:
            tags, offered = split_loras(prompt)[1], self.loras(card)
        except InputError:  # the run will say it
            return prompt, []
        names = {lora_name(name) for name in offered}
        missing = [tag.name for tag in tags if tag.name not in names]
        return without_loras(prompt, missing), missing

    def embeddings(self, card: ModelCard) -> dict[str, tuple[Path, Embedding]]:
        """Return the embeddings that fit a model, by their tokens. Of several with one token, the first counts."""
        found: dict[str, tuple[Path, Embedding]] = {}
        if not card.tokenizers:
            return found
        for path, embedding in self._embeddings.files().values():
            if embedding.token is not None and _fits(embedding, card):
                found.setdefault(embedding.token, (path, embedding))
        return found

    def with_names(self, request: Request) -> Request:
        """Return a request of the page with its LoRAs and embeddings by their names, as its PNG stores them."""
        lora, embedding = (tuple(map(self._named, each)) for each in (request.lora, request.embedding))
        return replace(request, lora=lora, embedding=embedding)

    def record_with_names(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a picture, with its LoRAs and embeddings by name."""
        return {**record, **{key: [*map(self._named, record[key])] for key in OPTION_FILES if key in record}}

    def _named(self, text: str) -> str:
        option = FileOption.parse(text)
        for folder in (self._loras.folder, self._embeddings.folder):
            if folder is not None and Path(option.path).is_relative_to(folder):
                return str(option._replace(path=Path(option.path).relative_to(folder).as_posix()))
        return text

    def check(self, request: Request) -> None:
        """Raise InputError if a file of a request is gone."""
        for path in _paths(request):
            if not path.is_file():
                raise InputError(f"{self._named(str(path))} is gone; reload the page, and choose another file")

    def without_paths(self, text: str, request: Request) -> str:
        """Return an error's text with the files of a request by name: users need not know the server's folders."""
        for path in _paths(request):
            text = text.replace(str(path), self._named(str(path)))
        return text

    def here(self, record: Mapping[str, Any], source: str, card: ModelCard) -> tuple[dict[str, Any], list[str]]:
        """Return the settings of the PNG `source` with the LoRAs that are here, and lines about the others.

        A LoRA is found by its name, else by its hash, else by the last part of its name. As for models, no large file
        is read: only hashes that are known count, and the others are computed in a thread. Embeddings follow from the
        prompt; those that are missing are named.
        """
        found, lines = [], []
        offered, digits = self.loras(card), record.get("lora_hashes") or ()
        for i, text in enumerate(record.get(LORA) or ()):
            option = FileOption.parse(text)
            name, line = find_offered("LoRA", option.path, digits[i] if i < len(digits) else None, offered, source)
            found += [] if name is None else [f"{name}:{weight_of(option):g}"]
            lines += [] if line is None else [line]
        tokens = self.embeddings(card) if record.get(EMBEDDING) else {}
        for option in map(FileOption.parse, record.get(EMBEDDING) or ()):
            if option.value not in tokens:
                lines.append(
                    f"not restored: the embedding {last_part(option.path)} ({option.value}), which is not here"
                )
        settings: dict[str, Any] = {**record, LORA: found}
        if record.get("prompt_syntax") == "weighted" and isinstance(record.get("prompt"), str):
            settings["prompt"], missing = self.without_missing(record["prompt"], card)
            lines += [f"not restored: <lora:{name}>, as no LoRA here has this name" for name in missing]
        return settings, lines


def _tagged(tag: Tag, chosen: Sequence[str], offered: Mapping[str, Path], card: ModelCard) -> str:
    """Return the LoRA that a prompt names: a chosen one, or else one that is on offer. Raises InputError."""
    for names in (chosen, list(offered)):
        same = [name for name in names if lora_name(name) == tag.name]
        if len(same) == 1:
            return same[0]
    if same:
        raise InputError(f"prompt: <lora:{tag.name}>: {' and '.join(same)} have this name; choose one of them")
    known = [lora_name(name) for name in offered][:MAX_LORAS]
    hint = did_you_mean(tag.name, known) or (f"such as {', '.join(known)}" if known else "the server offers none")
    raise InputError(f"prompt: <lora:{tag.name}>: {card.name} has no LoRA of this name here; {hint}")


def _paths(request: Request) -> list[Path]:
    """Return the LoRAs and embeddings of a request."""
    return [Path(FileOption.parse(text).path) for text in (*request.lora, *request.embedding)]


def _lora_header(path: Path) -> LoraHeader | None:
    try:
        file = read_single_file(path)
    except InputError:
        return None
    if file.kind not in kinds.ADAPTERS:
        return None
    tensors = file.header.tensors
    return LoraHeader(kinds.text_width_of(tensors), kinds.base_of_lora(tensors) == kinds.Z_IMAGE)


def _fits(embedding: Embedding, card: ModelCard) -> bool:
    """Return whether the text encoders of a model have the width of an embedding."""
    widths = [_width(card, part.name.replace("tokenizer", "text_encoder")) for part in card.tokenizers]
    if embedding.is_of_sdxl:
        return all(i < len(widths) and widths[i] == each.width for i, each in embedding.tensors.items())
    return embedding.tensors[0].width == widths[0]


def _width(card: ModelCard, part: str) -> Any:
    try:
        return read_json(card.folder / part / "config.json").get("hidden_size")
    except InputError:
        return None


def find_offered(
    what: str, name: str, digits: str | None, offered: Mapping[str, Path], source: str
) -> tuple[str | None, str | None]:
    """Return the name of a recorded file here, or None, and a line if it is missing or another file.

    what: for the line, such as "LoRA". digits: the recorded hash. offered: the files on offer. source: the PNG's name.
    """
    hashes = {each: _known(path) for each, path in offered.items()}
    same = [each for each, own in hashes.items() if own is not None and own == digits]
    named = [each for each in offered if last_part(each) == last_part(name)]
    found = name if name in offered else next(iter(same + named), None)
    if found is None:
        unknown = [offered[each] for each, own in hashes.items() if own is None] if digits else []
        begin_known(unknown)
        later = f"; fastdiff now computes {len(unknown)} hashes, so load the picture again later" if unknown else ""
        return None, f"not restored: the {what} {last_part(name)}, which is not here by name or hash{later}"
    return found, other_file(found, offered[found], digits, source)


def other_file(name: str, path: Path, digits: str | None, source: str) -> str | None:
    """Return a line if the known hash of a file is not the one recorded in the PNG `source`, or None."""
    own = _known(path)
    if not own or not digits or own == digits:
        return None
    return f"{name} is not the file that drew {source}: its hash is {own[:10]}, not {digits[:10]}"


def _known(path: Path) -> str | None:
    try:
        return known_hash(path)
    except OSError:  # it is gone
        return None

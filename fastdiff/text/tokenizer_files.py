"""Read and write the files of a tokenizer as transformers does: its vocabulary, merges, special tokens and length.

Imports no torch, and the `tokenizers` library only when needed.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval, Len

from fastdiff.arguments import mapping, naming
from fastdiff.checkpoints.json_files import MAX_BYTES, read_json
from fastdiff.errors import InputError
from fastdiff.schema import Schema, Wanted, checked

if TYPE_CHECKING:
    from tokenizers import AddedToken

START, END = "<|startoftext|>", "<|endoftext|>"  # CLIP's defaults
LENGTH = 77  # CLIP's default
NAMED = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
OWN_VOCABULARY = Path(__file__).parent / "clip"  # CLIP's, which a tokenizer_config.json without its own can name
MAX_TOKENS = 2**20  # of a vocabulary; CLIP's has 49,408

_REMEDY = "save the tokenizer again with save_pretrained"
_Id = Annotated[int, Interval(ge=0, le=MAX_TOKENS)]
_Ids = Annotated[dict[str, _Id], Wanted(f"an object of tokens and their ids; {_REMEDY}")]
_Merges = Annotated[tuple[tuple[str, str], ...], Wanted(f"a list of pairs of tokens; {_REMEDY}")]
_Objects = Annotated[tuple[dict[str, Any], ...], Wanted(f"a list of tokens with their options; {_REMEDY}")]


@dataclass(frozen=True)
class SpecialToken(Schema):
    """A text that is always one token, as AddedToken of the `tokenizers` library."""

    content: Annotated[str, Len(1, 256)]
    id: _Id | None = None  # the id in the folder's files
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # whether to match it in lower case; None: only if it is not special
    special: bool = False

    @property
    def is_normalized(self) -> bool:
        """Whether to match the text in lower case."""
        return not self.special if self.normalized is None else self.normalized

    @property
    def added(self) -> "AddedToken":
        """The token as the library's class."""
        from tokenizers import AddedToken

        return AddedToken(
            self.content,
            single_word=self.single_word,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            normalized=self.is_normalized,
            special=self.special,
        )


@dataclass(frozen=True)
class TokenizerConfig(Schema):
    """The options of a tokenizer_config.json that affect the ids of a prompt, except the special tokens."""

    model_max_length: Annotated[int, Interval(ge=2, le=2**16)] = LENGTH
    tokenizer_class: Literal["CLIPTokenizer", "CLIPTokenizerFast"] = "CLIPTokenizer"
    padding_side: Literal["right"] = "right"
    truncation_side: Literal["right"] = "right"
    split_special_tokens: Literal[False] = False


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer's folder."""

    length: int  # of a prompt in tokens, with padding
    vocabulary: dict[str, int]
    merges: tuple[tuple[str, str], ...]  # pairs of tokens; earlier pairs are merged first
    named: dict[str, SpecialToken]  # by the keys of NAMED
    added: tuple[SpecialToken, ...]  # every special token, in the order of the ids; then the tokens without an id


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json, or vocab.json and merges.txt, and the special tokens in the folder's other files.

    Raises InputError for a file that is missing or damaged, and for another kind of tokenizer.
    """
    whole = read_optional(folder / "tokenizer.json")
    path = folder / "tokenizer_config.json"
    options = read_optional(path)
    is_own = options.get("fastdiff_vocabulary") == OWN_VOCABULARY.name
    vocabulary, merges = _own() if is_own and not whole else read_vocabulary(folder, whole)
    names = TokenizerConfig.__dataclass_fields__.keys()
    config = TokenizerConfig.from_mapping({key: options[key] for key in names & options.keys()}, path)
    named, added = _special_tokens(folder, options, whole)
    return TokenizerFiles(config.model_max_length, vocabulary, merges, named, added)


def write_tokenizer(files: TokenizerFiles, ids: Mapping[str, int], folder: Path) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json, which `read_tokenizer` and transformers read back.

    ids: the id of each special token, by its text.
    """
    added = {
        str(ids[token.content]): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.is_normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token in files.added
    }
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": files.length, "added_tokens_decoder": added}
    config |= {key: token.content for key, token in files.named.items()}
    merges = ["#version: 0.2", *map(" ".join, files.merges), ""]
    (folder / "vocab.json").write_text(json.dumps(files.vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def read_optional(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or {} if there is none. Raises InputError for a damaged file."""
    return read_json(path) if path.exists() else {}


def read_vocabulary(folder: Path, whole: Mapping[str, Any]) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Return the vocabulary and the merges of a folder.

    whole: the content of its tokenizer.json, {} if there is none. Raises InputError for missing or damaged files.
    """
    return _of_one_file(folder, whole) if whole else _of_two_files(folder)


def read_added(folder: Path, options: Mapping[str, Any], whole: Mapping[str, Any]) -> list[SpecialToken]:
    """Return the tokens that a folder adds to its vocabulary, in the order of its files.

    Args:
        options: the content of its tokenizer_config.json.
        whole: the content of its tokenizer.json.

    Raises InputError for a damaged file.
    """
    path = folder / "tokenizer_config.json"
    decoder = options.get("added_tokens_decoder")
    if decoder is not None:
        with naming(f"{path}: added_tokens_decoder"):
            entries = checked("it", decoder, dict[str, dict[str, Any]]).items()
        return [SpecialToken.from_mapping({**entry, "id": _number(key)}, path) for key, entry in entries]
    path = folder / "added_tokens.json"
    with naming(str(path)):
        ids = checked("added tokens", read_optional(path), _Ids)
        found = [SpecialToken(content, id=number) for content, number in ids.items()]
    with naming(str(folder / "tokenizer.json")):
        entries = checked("added_tokens", whole.get("added_tokens", ()), _Objects)
    return found + [SpecialToken.from_mapping(entry, folder / "tokenizer.json") for entry in entries]


def _of_one_file(folder: Path, content: Mapping[str, Any]) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Return the vocabulary and merges of a tokenizer.json. As transformers does, ignore the rest of its model."""
    with naming(str(folder / "tokenizer.json")):
        model = mapping("model", content.get("model"))
        pairs = model.get("merges")
        if isinstance(pairs, list):  # in older files a pair is one text
            pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else pair for pair in pairs]
        return checked("vocab", model.get("vocab"), _Ids), checked("merges", pairs, _Merges)


@functools.cache
def _own() -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Return CLIP's vocabulary and merges, which both encoders of SDXL read."""
    return _of_two_files(OWN_VOCABULARY)


def _of_two_files(folder: Path) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    path = folder / "vocab.json"
    if not path.exists():
        raise InputError(f"{folder} has neither tokenizer.json nor vocab.json; {_REMEDY}")
    with naming(str(path)):
        vocabulary = checked("vocab", read_json(path), _Ids)
    path = folder / "merges.txt"
    lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    with naming(str(path)):
        return vocabulary, checked("merges", pairs, _Merges)


def read_text(path: Path) -> str:
    """Return the content of a text file. Raises InputError for a file that is no text, or too large."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a file; {_REMEDY}")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"{path} has more than the {MAX_BYTES >> 20} MB that fastdiff reads; {_REMEDY}")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not readable text ({error}); {_REMEDY}") from None


def _special_tokens(
    folder: Path, options: dict[str, Any], whole: dict[str, Any]
) -> tuple[dict[str, SpecialToken], tuple[SpecialToken, ...]]:
    """Return `named` and `added` of TokenizerFiles. Before transformers 4.34 they were spread over several files."""
    named = {key: options.get(key, default) for key, default in NAMED.items()}
    path = folder / "tokenizer_config.json"
    sources = dict.fromkeys(named, path)
    if options.get("added_tokens_decoder") is None:
        path = folder / "special_tokens_map.json"
        theirs = read_optional(path)
        named |= {key: theirs[key] for key in named.keys() & theirs.keys()}
        sources |= dict.fromkeys(named.keys() & theirs.keys(), path)
    # a later file replaces an earlier one
    known = {token.id: token for token in read_added(folder, options, whole)}
    added = {token.content: token for token in sorted(known.values(), key=lambda token: token.id or 0)}
    tokens = {key: _named_token(key, value, added, sources[key]) for key, value in named.items()}
    for token in dict.fromkeys(tokens.values()):  # of equal texts the last entry wins, as in transformers
        added[token.content] = token
    return tokens, tuple(added.values())


def _named_token(key: str, value: Any, added: Mapping[str, SpecialToken], path: Path) -> SpecialToken:
    """Return the special token for an entry of a file: its text, or a mapping with its options."""
    token = SpecialToken.from_mapping(value if isinstance(value, dict) else {"content": value}, f"{path}: {key}")
    return replace(added.get(token.content, token), special=True)


def _number(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key

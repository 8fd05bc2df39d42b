"""CLIPTokenizer: turns prompts into token ids for CLIP text encoders, with the BPE of the `tokenizers` library.

The vocabulary, the special tokens and the length come from a folder. The pattern that splits text into words is fixed,
as in transformers' CLIPTokenizer. Imports no torch.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fastdiff.arguments import instance, naming, path, shown
from fastdiff.checkpoints.registry import TOKENIZER
from fastdiff.errors import InputError, in_one_line
from fastdiff.text.tokenizer_files import TokenizerFiles, read_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

END_OF_WORD = "</w>"  # follows the last letter of a word
MOST_LETTERS = 256  # of the token of an embedding


class Tokens(NamedTuple):
    """The tokens of a prompt."""

    ids: tuple[int, ...]  # `CLIPTokenizer.length` ids: the start token, the prompt, the end token, padding
    cut: str = ""  # the end of the prompt's text that did not fit
    total: int = 0  # tokens of the whole prompt, with the end that did not fit, without the start and end tokens

    def warning(self, name: str = "prompt") -> str | None:
        """Return a warning that quotes what was cut; None if nothing was. `name`: what to call the text."""
        cut = " ".join(self.cut.split())
        return f"{name}: longer than the {len(self.ids)} tokens that the model reads; cut: {cut!r}" if cut else None


class Words(NamedTuple):
    """The library's tokenizer with the tokens of some embeddings, and what the prompt's tokens stand for."""

    tokenizer: "Tokenizer"
    embeddings: Mapping[str, int]  # the token of each embedding, and its number of vectors
    sequences: Mapping[int, tuple[str, ...]]  # the id of a token with several vectors -> their tokens


def vector_tokens(token: str, vectors: int) -> tuple[str, ...]:
    """Return the token of each vector of an embedding, as diffusers names them: cat, cat_1, cat_2."""
    return (token, *(f"{token}_{i}" for i in range(1, vectors)))


class CLIPTokenizer:
    """The tokenizer of a folder, such as a pipeline's `tokenizer`. It makes the ids of transformers' CLIPTokenizer.

    Attributes:
        length: the number of tokens that the text encoder reads.
        room: the number of those tokens that the prompt itself can use.
        size: one more than the largest id of the folder. The tokens of embeddings have the ids from `size` on.
        model_max_length: `length`, by transformers' name.
        start: the id of the start token.
        end: the id of the end token.
        pad: the id of the padding token.

    Raises InputError for files that are missing, damaged or inconsistent, and for another kind of tokenizer.
    """

    part = TOKENIZER

    def __init__(self, folder: str | Path):
        folder = Path(path("folder", folder))
        files = read_tokenizer(folder)
        _check_letters(files, folder)
        self._files = files
        self._folder = folder
        self.length = self.model_max_length = files.length
        self.room = self.length - 2
        try:
            built = _built(files)
        except Exception as error:  # the library raises plain Exception, such as for a merge of unknown tokens
            raise InputError(f"{folder}: it is no valid tokenizer ({in_one_line(error)}); save it again") from None
        self._ids = ids = {token.content: cast(int, built.token_to_id(token.content)) for token in files.added}
        for token in files.added:
            there = ids[token.content]
            if token.id not in (None, there):
                raise InputError(f"{folder}: the token {token.content!r} has id {there}, not {token.id}; save it again")
        self.size = 1 + max((*files.vocabulary.values(), *ids.values()))
        self.start, self.end, self.pad = (
            ids[files.named[name].content] for name in ("bos_token", "eos_token", "pad_token")
        )
        self._words = Words(built, {}, dict(self._sequences(built, ())))

    @classmethod
    def like(cls, live: Any, name: str = "tokenizer") -> "CLIPTokenizer":
        """Return our tokenizer of a live one of transformers. Raises InputError that begins with `name` for others."""
        if type(live).__name__ not in TOKENIZER.classes or not hasattr(live, "save_pretrained"):
            raise InputError(f"{name}: {shown(live)} has the wrong type; give a {TOKENIZER.class_name}")
        with TemporaryDirectory() as folder, naming(name):
            live.save_pretrained(folder)
            return cls(folder)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Save the tokenizer to a folder, which is created. transformers' CLIPTokenizer reads it back."""
        folder = Path(path("save_directory", save_directory))
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(self._files, self._ids, folder)

    @property
    def embeddings(self) -> Mapping[str, int]:
        """The tokens of the loaded embeddings (textual inversion) in the order of their ids, each with its vectors."""
        return self._words.embeddings

    def with_embeddings(self, embeddings: Mapping[str, int]) -> Words:
        """Return the words of this tokenizer with the tokens of these embeddings alone, for `use`.

        Raises InputError for a token that cannot be one: see `check_token`.
        """
        known: dict[str, int] = {}
        for token, vectors in embeddings.items():
            self.check_token(token, vectors, known)
            known[token] = vectors
        names = [name for token, vectors in known.items() for name in vector_tokens(token, vectors)]
        built = _built(self._files, names)
        if [built.token_to_id(name) for name in names] != [*range(self.size, self.size + len(names))]:
            raise InputError(f"{self._folder}: its ids have gaps, so no token can be added; save the tokenizer again")
        return Words(built, known, dict(self._sequences(built, names)))

    def use(self, words: Words) -> None:
        """Read prompts with these words from now on. The folder's own words stay as they are."""
        self._words = words

    def check_token(self, token: Any, vectors: int, embeddings: Mapping[str, int]) -> None:
        """Raise InputError unless an embedding of so many vectors can have this token beside other `embeddings`.

        As in diffusers, no token of the vocabulary is taken. Case does not count, because prompts are read in lower
        case.
        """
        if not isinstance(token, str) or not 1 <= len(token) <= MOST_LETTERS or not token.isprintable():
            wanted = f"a text of 1 to {MOST_LETTERS} letters"
            raise InputError(f"token: {shown(token)} is not {wanted}; give another one with token=")
        if " " in token:
            raise InputError(f"token: {shown(token)} has a space, and a token is one word; give another with token=")
        if vectors > self.room:
            raise InputError(
                f"token {token}: {vectors} vectors, and a prompt has room for {self.room}; give another embedding"
            )
        others = {name.lower() for other, count in embeddings.items() for name in vector_tokens(other, count)}
        others |= {name.lower() for name in self._ids}
        for name in vector_tokens(token, max(vectors, 2)):  # the name of a second vector would join the first
            if name in self._files.vocabulary or name.lower() in others:
                taken = "" if name == token else f"{name}, which names its second vector, "
                raise InputError(
                    f"token {token}: {taken}is already in the vocabulary of the tokenizer; give another token=, or "
                    "call unload_textual_inversion first"
                )
        stem, _, number = token.rpartition("_")
        if number.isdecimal() and stem.lower() in others:
            raise InputError(f"token {token}: it would name a vector of the token {stem}; give another with token=")

    def expand(self, prompt: str) -> str:
        """Return a prompt in which the tokens of all vectors follow a token of several: "cat" becomes "cat cat_1".

        As diffusers' maybe_convert_prompt, but the token is found in any case, as the tokenizer finds it.
        """
        check_text(prompt)
        words = self._words
        if not words.sequences:
            return prompt
        encoding, parts, end = words.tokenizer.encode(prompt, add_special_tokens=False), [], 0
        for number, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if number in words.sequences:
                parts += [prompt[end:first], " ".join(words.sequences[number])]
                end = last
        return "".join([*parts, prompt[end:]])

    def __call__(self, prompt: str) -> Tokens:
        """Return the `length` ids of a prompt, and the end of the prompt that was cut.

        Of an embedding with several vectors, `expand` names them all first.
        """
        check_text(prompt)
        encoding = self._words.tokenizer.encode(prompt, add_special_tokens=False)
        ids = (self.start, *encoding.ids[: self.room], self.end)
        cut = prompt[encoding.offsets[self.room][0] :] if len(encoding.ids) > self.room else ""
        return Tokens(ids + (self.pad,) * (self.length - len(ids)), cut, len(encoding.ids))

    def ids(self, text: str) -> Sequence[int]:
        """Return the ids of a text of any length, without the start and end tokens."""
        check_text(text)
        return self._words.tokenizer.encode(text, add_special_tokens=False).ids

    def embeddings_in(self, prompt: str, *, is_whole: bool = False) -> list[str]:
        """Return the tokens of the embeddings in the part of a prompt that the text encoder reads.

        is_whole: whether it reads all of the prompt, as it does a weighted one.
        """
        text, first, found = self.expand(prompt), self.size, []
        ids = {*(self.ids(text) if is_whole else self(text).ids)}
        for token, vectors in self.embeddings.items():
            found += [token] if ids & {*range(first, first + vectors)} else []
            first += vectors
        return found

    def _sequences(self, built: "Tokenizer", names: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the id of each token that others continue, cat, cat_1 and so on, and all these tokens."""
        added = {token.content for token in self._files.added if not token.special} | {*names}
        for token in added:
            count = next(i for i in itertools.count(1) if f"{token}_{i}" not in added)
            if count > 1:
                yield cast(int, built.token_to_id(token)), vector_tokens(token, count)


def check_text(prompt: Any) -> None:
    """Raise InputError unless a prompt is a text that can be encoded."""
    try:
        instance("prompt", prompt, str, "a text").encode()
    except UnicodeEncodeError:
        raise InputError("prompt: it has half a surrogate pair, which is not a character; remove it") from None


def _check_letters(files: TokenizerFiles, folder: Path) -> None:
    """Raise InputError for a vocabulary that lacks a letter and has no token for unknown letters."""
    from tokenizers.pre_tokenizers import ByteLevel

    unknown = files.named["unk_token"].content
    letters = {f"{letter}{end}" for letter in ByteLevel.alphabet() for end in ("", END_OF_WORD)}
    if unknown not in files.vocabulary and not letters <= files.vocabulary.keys():
        raise InputError(f"{folder}: its vocabulary lacks letters, and the unknown token {unknown!r}; save it again")


def _built(files: TokenizerFiles, names: Sequence[str] = ()) -> "Tokenizer":
    """Return the library's tokenizer, built as transformers' CLIPTokenizer builds it, with more tokens of `names`."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(
        BPE(
            vocab=files.vocabulary,
            merges=list(files.merges),
            end_of_word_suffix=END_OF_WORD,
            unk_token=files.named["unk_token"].content,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_tokens([token.added for token in files.added])
    tokenizer.add_tokens([*names])
    return tokenizer

"""Prompts to the token ids that CLIP's text encoders read: byte pairs of words, by the `tokenizers` library.

The vocabulary, the special tokens and the length are a folder's. How text falls into words is CLIP's own, and fixed
here as it is in transformers' CLIPTokenizer. Imports no torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from fastdiff.arguments import instance, path
from fastdiff.errors import InputError, in_one_line
from fastdiff.text.tokenizer_files import TokenizerFiles, read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

END_OF_WORD = "</w>"  # behind the last letter of a word


class Tokens(NamedTuple):
    """A prompt as a text encoder reads it."""

    ids: tuple[int, ...]  # as many as the tokenizer is long: the start token, the prompt, the end token, padding
    cut: str = ""  # the end of the prompt, as it was given, that there was no room for
    total: int = 0  # tokens of the whole prompt, what was cut included, without the start and the end

    def warning(self, name: str = "prompt") -> str | None:
        """The line that says what was cut of the text of this name; None where nothing was."""
        cut = " ".join(self.cut.split())
        return f"{name}: longer than the {len(self.ids)} tokens that the model reads; cut: {cut!r}" if cut else None


class CLIPTokenizer:
    """The tokenizer in a folder, a pipeline's `tokenizer` or `tokenizer_2`; the ids are those of transformers' class.

    `length` is the number of tokens that an encoder reads, `room` that of a prompt's own among them, `size` one more
    than the largest id; `start`, `end` and `pad` are the ids of the tokens around a prompt. Raises InputError for files
    that are missing, damaged, do not fit one another, or ask for a tokenizer of another kind.
    """

    def __init__(self, folder: str | Path):
        folder = Path(path("folder", folder))
        files = read_tokenizer(folder)
        _check_letters(files, folder)
        self.length = files.length
        self.room = self.length - 2
        try:
            self._tokenizer = _built(files)
        except Exception as error:  # the library's own have no class: a merge of what the vocabulary lacks...
            raise InputError(f"{folder}: it makes no tokenizer ({in_one_line(error)}); save it again") from None
        ids = {token.content: cast(int, self._tokenizer.token_to_id(token.content)) for token in files.added}
        for token in files.added:
            there = ids[token.content]
            if token.id not in (None, there):
                raise InputError(f"{folder}: the token {token.content!r} is {there}, not {token.id}; save it again")
        self.size = 1 + max((*files.vocabulary.values(), *ids.values()))
        self.start, self.end, self.pad = (
            ids[files.named[name].content] for name in ("bos_token", "eos_token", "pad_token")
        )

    def __call__(self, prompt: str) -> Tokens:
        """Return the ids of a prompt, `length` of them, and the end of it that was cut."""
        try:
            instance("prompt", prompt, str, "a text").encode()
        except UnicodeEncodeError:
            raise InputError("prompt: it holds half a surrogate pair, which is no character; remove it") from None
        encoding = self._tokenizer.encode(prompt, add_special_tokens=False)
        ids = (self.start, *encoding.ids[: self.room], self.end)
        cut = prompt[encoding.offsets[self.room][0] :] if len(encoding.ids) > self.room else ""
        return Tokens(ids + (self.pad,) * (self.length - len(ids)), cut, len(encoding.ids))


def _check_letters(files: TokenizerFiles, folder: Path) -> None:
    """InputError for a vocabulary that has no token for some letter: not its own, nor that of unknown ones."""
    from tokenizers.pre_tokenizers import ByteLevel

    unknown = files.named["unk_token"].content
    letters = {f"{letter}{end}" for letter in ByteLevel.alphabet() for end in ("", END_OF_WORD)}
    if unknown not in files.vocabulary and not letters <= files.vocabulary.keys():
        raise InputError(
            f"{folder}: its vocabulary lacks letters, and the token {unknown!r} that stands for them; save it again"
        )


def _built(files: TokenizerFiles) -> "Tokenizer":
    """Return the library's tokenizer, put together as transformers' CLIPTokenizer does."""
    from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
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
    tokenizer.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=not token.special if token.normalized is None else token.normalized,
                special=token.special,
            )
            for token in files.added
        ]
    )
    return tokenizer

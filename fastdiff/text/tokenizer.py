"""CLIPTokenizer: turns prompts into token ids for CLIP text encoders, with the BPE of the `tokenizers` library.

The vocabulary, the special tokens and the length come from a folder. The pattern that splits text into words is fixed,
as in transformers' CLIPTokenizer. Imports no torch.
"""

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


class Tokens(NamedTuple):
    """The tokens of a prompt."""

    ids: tuple[int, ...]  # `CLIPTokenizer.length` ids: the start token, the prompt, the end token, padding
    cut: str = ""  # the end of the prompt's text that did not fit
    total: int = 0  # tokens of the whole prompt, with the end that did not fit, without the start and end tokens

    def warning(self, name: str = "prompt") -> str | None:
        """Return a warning that quotes what was cut; None if nothing was. `name`: what to call the text."""
        cut = " ".join(self.cut.split())
        return f"{name}: longer than the {len(self.ids)} tokens that the model reads; cut: {cut!r}" if cut else None


class CLIPTokenizer:
    """The tokenizer of a folder, such as a pipeline's `tokenizer`. The ids are those of transformers' CLIPTokenizer.

    Attributes:
        length: the number of tokens that the text encoder reads.
        room: the number of those tokens that the prompt itself can use.
        size: one more than the largest id.
        model_max_length: `length`, by transformers' name.
        start: the id of the start token.
        end: the id of the end token.
        pad: the id of the padding token.

    Raises InputError for files that are missing, damaged or inconsistent, and for another kind of tokenizer.
    """

    def __init__(self, folder: str | Path):
        folder = Path(path("folder", folder))
        files = read_tokenizer(folder)
        _check_letters(files, folder)
        self._files = files
        self.length = self.model_max_length = files.length
        self.room = self.length - 2
        try:
            self._tokenizer = _built(files)
        except Exception as error:  # the library raises plain Exception, such as for a merge of unknown tokens
            raise InputError(f"{folder}: it is no valid tokenizer ({in_one_line(error)}); save it again") from None
        self._ids = ids = {
            token.content: cast(int, self._tokenizer.token_to_id(token.content)) for token in files.added
        }
        for token in files.added:
            there = ids[token.content]
            if token.id not in (None, there):
                raise InputError(f"{folder}: the token {token.content!r} has id {there}, not {token.id}; save it again")
        self.size = 1 + max((*files.vocabulary.values(), *ids.values()))
        self.start, self.end, self.pad = (
            ids[files.named[name].content] for name in ("bos_token", "eos_token", "pad_token")
        )

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

    def __call__(self, prompt: str) -> Tokens:
        """Return the `length` ids of a prompt, and the end of the prompt that was cut."""
        try:
            instance("prompt", prompt, str, "a text").encode()
        except UnicodeEncodeError:
            raise InputError("prompt: it has half a surrogate pair, which is not a character; remove it") from None
        encoding = self._tokenizer.encode(prompt, add_special_tokens=False)
        ids = (self.start, *encoding.ids[: self.room], self.end)
        cut = prompt[encoding.offsets[self.room][0] :] if len(encoding.ids) > self.room else ""
        return Tokens(ids + (self.pad,) * (self.length - len(ids)), cut, len(encoding.ids))


def _check_letters(files: TokenizerFiles, folder: Path) -> None:
    """Raise InputError for a vocabulary that lacks a letter and has no token for unknown letters."""
    from tokenizers.pre_tokenizers import ByteLevel

    unknown = files.named["unk_token"].content
    letters = {f"{letter}{end}" for letter in ByteLevel.alphabet() for end in ("", END_OF_WORD)}
    if unknown not in files.vocabulary and not letters <= files.vocabulary.keys():
        raise InputError(f"{folder}: its vocabulary lacks letters, and the unknown token {unknown!r}; save it again")


def _built(files: TokenizerFiles) -> "Tokenizer":
    """Return the library's tokenizer, built as transformers' CLIPTokenizer builds it."""
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
                normalized=token.is_normalized,
                special=token.special,
            )
            for token in files.added
        ]
    )
    return tokenizer

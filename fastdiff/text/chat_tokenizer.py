"""ChatTokenizer: turns prompts into token ids for Qwen's text encoders, as a turn of a chat.

The vocabulary, the special tokens and the chat template come from a folder. The pattern that splits text into words is
fixed, as in transformers' Qwen2Tokenizer. Imports no torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from fastdiff.arguments import naming, path, shown
from fastdiff.checkpoints.registry import CHAT_TOKENIZER
from fastdiff.errors import InputError, in_one_line
from fastdiff.schema import Schema, checked, whole
from fastdiff.text.chat_template import ChatTemplate
from fastdiff.text.tokenizer import Tokens, check_text
from fastdiff.text.tokenizer_files import SpecialToken, read_added, read_optional, read_text, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
LENGTH = 512  # tokens of a prompt with its chat template, as in diffusers' ZImagePipeline
MAX_LENGTH = 2**15


@dataclass(frozen=True)
class ChatTokenizerConfig(Schema):
    """The options of a tokenizer_config.json that affect the ids of a prompt, except the special tokens."""

    tokenizer_class: Literal["Qwen2Tokenizer", "Qwen2TokenizerFast"] = "Qwen2Tokenizer"
    truncation_side: Literal["right"] = "right"
    split_special_tokens: Literal[False] = False
    add_prefix_space: Literal[False] | None = None
    add_bos_token: Literal[False] = False


class ChatTokenizer:
    """The tokenizer of a folder, such as Z-Image's `tokenizer`. It makes the ids of transformers' Qwen2Tokenizer.

    Raises InputError for files that are missing, damaged or inconsistent, and for another kind of tokenizer.
    """

    part = CHAT_TOKENIZER

    def __init__(self, folder: str | Path):
        folder = Path(path("folder", folder))
        config = folder / CONFIG
        self._options = read_optional(config)
        names = ChatTokenizerConfig.__dataclass_fields__.keys()
        ChatTokenizerConfig.from_mapping({key: self._options[key] for key in names & self._options.keys()}, config)
        content = read_optional(folder / "tokenizer.json")
        vocabulary, merges = read_vocabulary(folder, content)
        added = sorted(read_added(folder, self._options, content), key=lambda token: token.id or 0)
        try:
            self._tokenizer = _built(vocabulary, merges, added)
        except Exception as error:  # the library raises plain Exception, such as for a merge of unknown tokens
            raise InputError(f"{folder}: it is no valid tokenizer ({in_one_line(error)}); save it again") from None
        for token in added:
            there = self._tokenizer.token_to_id(token.content)
            if token.id not in (None, there):
                raise InputError(f"{folder}: the token {token.content!r} has id {there}, not {token.id}; save it again")
        own = folder / TEMPLATE
        text, source = (read_text(own), own) if own.exists() else (self._options.get("chat_template"), config)
        if text is None:
            raise InputError(f"{folder} has no chat_template; save the tokenizer again, or download it again")
        self._template = ChatTemplate(text, source)

    @classmethod
    def like(cls, live: Any, name: str = "tokenizer") -> "ChatTokenizer":
        """Return our tokenizer of a live one of transformers. Raises InputError that begins with `name` for others."""
        if type(live).__name__ not in CHAT_TOKENIZER.classes or not hasattr(live, "save_pretrained"):
            raise InputError(f"{name}: {shown(live)} has the wrong type; give a {CHAT_TOKENIZER.class_name}")
        with TemporaryDirectory() as folder, naming(name):
            live.save_pretrained(folder)
            return cls(folder)

    @property
    def room(self) -> int:
        """The number of tokens that a prompt of the default length can use beside its chat template."""
        return LENGTH - self("").total

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Save the tokenizer to a folder, which is created. transformers' Qwen2Tokenizer reads it back."""
        folder = Path(path("save_directory", save_directory))
        folder.mkdir(parents=True, exist_ok=True)
        options = {key: value for key, value in self._options.items() if key != "chat_template"}
        options |= {"tokenizer_class": CHAT_TOKENIZER.class_name}
        (folder / CONFIG).write_text(json.dumps(options, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (folder / TEMPLATE).write_text(self._template.text, encoding="utf-8")
        self._tokenizer.save(str(folder / "tokenizer.json"))

    def expand(self, prompt: str) -> str:
        """Return a prompt as it is, because there are no embeddings; see `CLIPTokenizer.expand`."""
        return prompt

    def __call__(self, prompt: str, length: int = LENGTH) -> Tokens:
        """Return the ids of a prompt in its chat template, at most `length`, without padding.

        Raises InputError for a prompt that is no text, and for a template that fails.
        """
        check_text(prompt)
        checked("max_sequence_length", length, whole(1, MAX_LENGTH))
        text = self._template.render(prompt)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        end = text.rfind(prompt) + len(prompt)  # the template may go on
        cut = text[encoding.offsets[length][0] : end] if len(encoding.ids) > length else ""
        return Tokens(tuple(encoding.ids[:length]), cut, len(encoding.ids))


def _built(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], added: Sequence[SpecialToken]) -> "Tokenizer":
    """Return the library's tokenizer, built as transformers' Qwen2Tokenizer builds it."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.add_tokens([token.added for token in added])
    return tokenizer

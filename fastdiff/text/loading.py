"""Load the tokenizer of a pipeline's folder. Imports no torch."""

from pathlib import Path

from fastdiff.checkpoints.registry import CHAT_TOKENIZER, TokenizerPart
from fastdiff.text.chat_tokenizer import ChatTokenizer
from fastdiff.text.tokenizer import CLIPTokenizer

Tokenizer = CLIPTokenizer | ChatTokenizer


def load_tokenizer(part: TokenizerPart, folder: Path) -> Tokenizer:
    """Return the tokenizer of a part in the folder of a pipeline. Raises as `CLIPTokenizer` and `ChatTokenizer`."""
    return (ChatTokenizer if part is CHAT_TOKENIZER else CLIPTokenizer)(folder / part.name)

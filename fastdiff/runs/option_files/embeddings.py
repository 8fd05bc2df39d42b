"""The embeddings of a run (textual inversion): their tokens. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.single_files.embeddings import read_embedding
from fastdiff.errors import InputError
from fastdiff.requests.file_option import FileOption
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.runs.option_files.kinds import EMBEDDING
from fastdiff.text.loading import Tokenizer, load_tokenizer
from fastdiff.text.tokenizer import CLIPTokenizer


def with_embeddings_here(request: Request, source: Recorded | None, folder: str | None) -> Request:
    """Return the request with each embedding as FILE:TOKEN. A file of the PNG `source` is found where it is now.

    folder: where it may be, as in `Kind.here`.
    Raises InputError that names a file which is nowhere or is no embedding, and a token that two have.
    """
    found: dict[str, str] = {}
    for option in EMBEDDING.here(request, source, folder):
        token = option.value or read_embedding(option.path).token or ""
        if token in found:
            raise InputError(f"embedding {option.path}: {found[token]} has the token {token} too; give FILE:TOKEN")
        found[token] = option.path
    return replace(request, embedding=tuple(str(FileOption(path, token)) for token, path in found.items()))


def tokenizers_of(request: Request, card: ModelCard) -> list[Tokenizer]:
    """Return the tokenizers of a model, which know the tokens of a request's embeddings.

    Raises InputError for files that are missing or damaged, and for a token that they refuse.
    """
    tokenizers = [load_tokenizer(part, card.folder) for part in card.tokenizers]
    _teach_tokens(request, clip_tokenizers(tokenizers))
    return tokenizers


def clip_tokenizers(tokenizers: Sequence[Tokenizer]) -> list[CLIPTokenizer]:
    """Return the tokenizers that know embeddings and weighted prompts."""
    return [each for each in tokenizers if isinstance(each, CLIPTokenizer)]


def _teach_tokens(request: Request, tokenizers: Sequence[CLIPTokenizer]) -> None:
    for text in request.embedding:
        path, token = FileOption.parse(text)
        embedding = read_embedding(path)
        for i in embedding.tensors if embedding.is_of_sdxl else [0]:
            if token is not None and i < len(tokenizers):
                known = {**tokenizers[i].embeddings, token: embedding.vectors}
                tokenizers[i].use(tokenizers[i].with_embeddings(known))


def changed_embeddings(source: Recorded, request: Request) -> Iterator[str]:
    """Yield a line for each embedding of the PNG whose file has another hash now."""
    digits = {FileOption.parse(text).value: known for text, known in EMBEDDING.recorded(source).items()}
    for text in request.embedding:
        path, token = FileOption.parse(text)
        yield from EMBEDDING.other_hash(path, digits.get(token), source.path)

"""The embeddings of a run (textual inversion): their files, tokens and hashes. Imports no torch.

A request and a PNG name an embedding as FILE:TOKEN. A PNG also has the SHA-256 of each file, in the same order.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.checkpoints.single_files.embeddings import read_embedding
from fastdiff.checkpoints.single_files.listing import find_file, last_part
from fastdiff.errors import InputError
from fastdiff.requests.file_option import FileOption
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.text.tokenizer import CLIPTokenizer


def with_embeddings_here(request: Request, source: Recorded | None, folder: str | None) -> Request:
    """Return the request with each embedding as FILE:TOKEN. A file of the PNG `source` is found where it is now.

    folder: where it may be, by its hash or name. It may also be in the current folder, by its name.
    Raises InputError that names a file which is nowhere or is no embedding, and a token that two have.
    """
    if folder is not None and not os.path.isdir(folder):
        raise InputError(f"--embedding-dir: {folder} is not a folder; give the folder of your embeddings")
    recorded = _recorded(source)
    found: dict[str, str] = {}
    for text in request.embedding:
        option = FileOption.parse(text)
        if source is not None and text in recorded and not os.path.exists(option.path):
            option = option._replace(path=_find(option.path, recorded[text], source.path, folder))
        token = option.value or read_embedding(option.path).token or ""
        if token in found:
            raise InputError(f"embedding {option.path}: {found[token]} has the token {token} too; give FILE:TOKEN")
        found[token] = option.path
    return replace(request, embedding=tuple(str(FileOption(path, token)) for token, path in found.items()))


def teach_tokens(request: Request, tokenizers: Sequence[CLIPTokenizer]) -> None:
    """Let a model's tokenizers know the tokens of a request's embeddings. Raises InputError for a token they refuse."""
    for text in request.embedding:
        path, token = FileOption.parse(text)
        embedding = read_embedding(path)
        for i in embedding.tensors if embedding.is_of_sdxl else [0]:
            if token is not None and i < len(tokenizers):
                known = {**tokenizers[i].embeddings, token: embedding.vectors}
                tokenizers[i].use(tokenizers[i].with_embeddings(known))


def embedding_files(request: Request) -> list[Path]:
    """Return the files of a request's embeddings, in order."""
    return [Path(FileOption.parse(text).path) for text in request.embedding]


def changed_embeddings(source: Recorded, request: Request) -> Iterator[str]:
    """Yield a line for each embedding of the PNG whose file has another hash now."""
    digits = {FileOption.parse(text).value: known for text, known in _recorded(source).items()}
    for text in request.embedding:
        path, token = FileOption.parse(text)
        known = digits.get(token)
        if known and (now := file_hash(Path(path))) != known:
            yield (
                f"{path} has the embedding hash {now[:10]}, and {source.path} was drawn with {known[:10]}; the picture "
                "will differ"
            )


def _recorded(source: Recorded | None) -> dict[str, str | None]:
    """Return the embeddings of a PNG, each with the SHA-256 of its file."""
    settings = {} if source is None else source.settings
    names, digits = settings.get("embedding") or (), settings.get("embedding_hashes") or ()
    return {name: digits[i] if i < len(digits) and digits[i].isalnum() else None for i, name in enumerate(names)}


def _find(name: str, digits: str | None, source: str, folder: str | None) -> str:
    found = None if folder is None else find_file(name, digits, Path(folder))
    last = last_part(name)
    if found is not None or os.path.isfile(last):
        return last if found is None else str(found)
    places = f"{name} or here, and no folder is given" if folder is None else f"{name}, in {folder} or here"
    raise InputError(
        f"{source} was drawn with the embedding {last}, hash {digits[:10] if digits else 'unknown'}: it is not at "
        f"{places}; give the file with --embedding, or its folder with --embedding-dir"
    )

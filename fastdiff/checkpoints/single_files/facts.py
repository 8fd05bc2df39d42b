"""The facts of a single file that `fastdiff info` prints. Only the header is read, and for the hash the whole file."""

import os
from pathlib import Path
from typing import Any

from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.cards import guessed_prediction
from fastdiff.checkpoints.single_files.embeddings import Embedding
from fastdiff.checkpoints.single_files.reading import SingleFile

QUICK = 2**28  # bytes that are hashed in less than a second


def read_facts(file: SingleFile, *, with_hash: bool | None = None) -> dict[str, Any]:
    """Return the facts of a file by name, as JSON values, without those that it does not have.

    with_hash: whether to read the whole file for its hashes. Default: only if it is small.
    """
    size = os.path.getsize(file.path)
    facts: dict[str, Any] = {"file": str(file.path), "bytes": size, "kind": file.kind, "base model": file.base}
    facts |= {"prediction": _prediction(file), "zero terminal SNR": file.has_zero_snr or None}
    facts["parts"] = {name: file.precision(name) for name in file.parts}
    facts |= {"EMA weights": file.has_ema or None, "tensors": len(file.header.tensors)}
    facts["cannot be loaded"] = None if file.refusal is None else file.refusal
    if with_hash or (with_hash is None and size <= QUICK):
        digits = file_hash(file.path)
        facts |= {"SHA-256": digits, "AutoV2": digits[:10].upper()}
    facts["metadata"] = file.header.metadata or None
    return {name: value for name, value in facts.items() if value not in (None, {})}


def embedding_facts(path: Path, embedding: Embedding) -> dict[str, Any]:
    """Return the facts of an embedding's file, as JSON values."""
    digits, vectors = file_hash(path), embedding.vectors
    facts = {"file": str(path), "bytes": os.path.getsize(path), "kind": "embedding (textual inversion)"}
    facts |= {"base model": embedding.base, "token": embedding.token, "vectors": vectors}
    return facts | {"SHA-256": digits, "AutoV2": digits[:10].upper()}


def _prediction(file: SingleFile) -> str | None:
    """Return what the U-Net predicts, and how that is known. None without a U-Net that fastdiff knows."""
    stated = file.stated_prediction()
    if stated is not None:
        return f"{stated} (the file says so)"
    if file.base is None or file.refusal is not None or "unet" not in file.parts:
        return None
    if file.base == kinds.SD2:
        return f"{guessed_prediction(file)} (a guess: the file does not say)"
    return "epsilon (usual for this model; the file does not say)"

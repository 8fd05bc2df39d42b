"""Recognise LoRA files by their headers: kind, base model, ranks and layers. Imports no torch."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.adapters.names import PEFT_PREFIX, TRANSFORMER, UNET, parse
from fastdiff.arguments import shown
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.controlnets import control_file
from fastdiff.checkpoints.single_files.embeddings import Embedding, read_embedding
from fastdiff.checkpoints.single_files.facts import embedding_facts, read_facts
from fastdiff.checkpoints.single_files.reading import SingleFile, checked_header, read_single_file
from fastdiff.checkpoints.weight_files import Header
from fastdiff.errors import InputError

# A pattern of keys -> what such a file is, for kinds that no version of this code reads
REFUSED = {
    r"\.dora_scale$": "DoRA of kohya's or LyCORIS's format (dora_scale); convert it to diffusers' format",
    r"\.diff(?:_b)?$": "whole differences of weights (diff, diff_b); use a LoRA without them",
    r"\.on_input$": "an IA3 adapter; fastdiff reads LoRA, LoHa and LoKr",
    r"\.[ab][12]\.weight$": "a GLoRA adapter; fastdiff reads LoRA, LoHa and LoKr",
    r"\.oft_(?:blocks|diag|R)\b|\.oft_": "an OFT adapter; fastdiff reads LoRA, LoHa and LoKr",
    r"^bundle_emb\.": "textual inversions beside the LoRA (bundle_emb); load them with load_textual_inversion",
    r"\.lora_[AB](?:\.\w+)?\.bias$": "biases of lora_B (lora_bias); train it without them",
    r"\.lora_embedding_[AB]": "changes of an embedding table (lora_embedding); train it without them",
    r"^(?:lora_)?transformer[._](?!(?:layers|(?:noise|context)_refiner)[._]\d|(?:all_\w+|cap_embedder|t_embedder)[._])"
    r"|double_blocks|single_blocks|joint_blocks": (
        "a LoRA of another model family, such as Flux or Stable Diffusion 3; use one of this model"
    ),
}
_ANY_REFUSED = re.compile("|".join(REFUSED))
_KOHYA = re.compile(r"lora_(?:unet|te\d?)_")
_RANKED = ("down", "w1_b", "lokr_w1_b", "lokr_w2_b")  # what has the rank as its first size
# What the metadata of kohya's trainers begins with -> the base model
_STATED = {"sd_v1": kinds.SD1, "sd_v2": kinds.SD2, "sdxl": kinds.SDXL}
_STATED |= {"stable-diffusion-v1": kinds.SD1, "stable-diffusion-v2": kinds.SD2, "stable-diffusion-xl": kinds.SDXL}
_STATING = ("ss_base_model_version", "modelspec.architecture")


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file, as its header describes it."""

    file: SingleFile
    kind: str  # such as "LoRA" or "LoHa and LoRA"
    format: str  # whose naming the keys have
    base: str | None  # one of kinds.BASES; None if nothing tells it
    ranks: tuple[int, ...]  # from small to large
    layers: Mapping[str, int]  # part of the pipeline -> the number of layers that the file changes
    refusal: str | None  # why fastdiff cannot load it

    @property
    def summary(self) -> str:
        """The LoRA in a line of a list."""
        if self.refusal is not None:
            return f"unusable: {self.kind}: {self.refusal}"
        count = sum(self.layers.values())
        base = f" of {self.base}" if self.base else ""
        rank = f", {self.rank_text}" if self.ranks else ""
        return f"{self.kind}{base}{rank}, {count} layer{'' if count == 1 else 's'}, {self.format} format"

    @property
    def rank_text(self) -> str:
        """The ranks in words, such as "rank 4" or "ranks 4 to 32"."""
        first, last = self.ranks[0], self.ranks[-1]
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    def facts(self, *, with_hash: bool | None = None) -> dict[str, Any]:
        """Return the facts by name, as JSON values. with_hash: as in `read_facts`."""
        usual = read_facts(self.file, with_hash=with_hash)
        facts = {name: usual[name] for name in ("file", "bytes")}
        facts |= {"kind": self.kind, "base model": self.base, "format": self.format}
        facts |= {"ranks": list(self.ranks), "layers": dict(self.layers)}
        facts |= {name: value for name, value in usual.items() if name not in facts}
        return {name: value for name, value in facts.items() if value not in (None, [], {})}


def describe(path: str | Path) -> LoraFile | Embedding | SingleFile:
    """Return what a file of weights is. Only its header is read.

    Raises InputError for a file that is damaged, or unknown.
    """
    path = Path(path)
    try:
        found = read_single_file(path)
    except InputError as error:
        return _unknown(path, error)
    if found.refusal is not None and found.kind in kinds.ADAPTERS:
        return _lora(found)
    if found.kind == kinds.A_CONTROLNET:
        return control_file(path, found.header)
    return read_embedding(path) if found.kind == kinds.EMBEDDING else found


def facts_of(path: str | Path, *, with_hash: bool | None = None) -> dict[str, Any]:
    """Return the facts of any file of weights, as JSON values. with_hash and errors: as in `read_facts`, `describe`."""
    found = describe(path)
    if isinstance(found, LoraFile):
        return found.facts(with_hash=with_hash)
    if isinstance(found, Embedding):
        return embedding_facts(Path(path), found)
    return read_facts(found, with_hash=with_hash)


def _unknown(path: Path, error: InputError) -> LoraFile | Embedding:
    """Return what a file is that holds no model. Raises `error` if it is nothing that fastdiff knows."""
    try:
        header = checked_header(path)
        if any(_KOHYA.match(key) for key in header.tensors):
            return _lora(SingleFile(path, "a LoRA", None, {}, header, "a LoRA"))
        return read_embedding(path)
    except InputError:
        raise error from None


def _lora(file: SingleFile) -> LoraFile:
    tensors = file.header.tensors
    base = kinds.base_of_lora(tensors) or _stated_base(file.header)
    denoiser = TRANSFORMER if base == kinds.Z_IMAGE else UNET
    roles: dict[tuple[str, str], set[str]] = {}  # (part, layer) -> what the file has of it
    ranks = set()
    for key, tensor in tensors.items():
        parsed = parse(key)
        if parsed is None:
            continue
        part = denoiser if parsed.part in (None, UNET) else parsed.part
        roles.setdefault((part, parsed.module), set()).add(parsed.role)
        if parsed.role in _RANKED and tensor.shape:
            ranks.add(tensor.shape[0])
    refused = next(filter(None, map(refusal, tensors)), None)
    half = next((layer for (_, layer), has in roles.items() if len(has & {"down", "up"}) == 1), None)
    if refused is None and half is not None:
        refused = f"it has only one of the two matrices of {shown(half)}; use another file"
    layers = Counter(part for (part, _), has in roles.items() if has != {"alpha"})
    unplaced = not layers and refused is None
    problem = "it changes no layer; use another file" if unplaced else refused
    described = SingleFile(file.path, file.kind, base, {}, file.header, problem)
    return LoraFile(
        described, _kind(roles.values(), tensors), _format(tensors), base, tuple(sorted(ranks)), layers, problem
    )


def _kind(layers: Iterable[set[str]], tensors: Iterable[str]) -> str:
    """Return the kinds of adapters in words."""
    roles = set().union(*layers)
    is_dora = "magnitude" in roles or any(key.endswith(".dora_scale") for key in tensors)
    has = {
        "LoHa": bool(roles & {"w1_a", "w1_b"}),
        "LoKr": any(role.startswith("lokr_") for role in roles),
        "DoRA": is_dora,
        "LoRA": bool(roles & {"down", "up"}) and not is_dora,
    }
    return " and ".join(name for name, there in has.items() if there) or "adapter"


def _format(keys: Iterable[str]) -> str:
    """Return whose naming the keys of a file have."""
    for key in keys:
        if key.startswith(PEFT_PREFIX):
            return "peft"
        if _KOHYA.match(key):
            return "kohya"
    return "diffusers"


def refusal(key: str) -> str | None:
    """Return what kind of adapter a key is of, if fastdiff does not read this kind."""
    if not _ANY_REFUSED.search(key):
        return None
    return next(what for pattern, what in REFUSED.items() if re.search(pattern, key))


def _stated_base(header: Header) -> str | None:
    """Return the base model that the metadata names, or that a key for a second text encoder tells."""
    if any(key.startswith(("lora_te2_", "text_encoder_2.")) for key in header.tensors):
        return kinds.SDXL
    said = [header.metadata.get(name, "").lower() for name in _STATING]
    return next((base for text in said for start, base in _STATED.items() if text.startswith(start)), None)

"""Read the files of IP-Adapters (Ye et al. 2023, arXiv 2308.06721), and refuse what is not one by its name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.checkpoints.single_files.reading import checked_header
from fastdiff.checkpoints.weights import load_pickle
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_LAYERS

IMAGE, LAYERS = "image_proj.", "ip_adapter."  # the prefixes of the two parts of a file
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")
_HEAD = 64  # the width of a head of a plus adapter's attentions; fixed in diffusers
# A pattern of keys -> the kind of adapter, for kinds that are not read
_REFUSED = {
    r"_lora\.(?:down|up)\.weight$": "an IP-Adapter FaceID, which reads embeddings of faces and brings a LoRA",
    r"^image_proj\.perceiver_resampler\.": "an IP-Adapter FaceID Plus, which reads embeddings of faces",
    r"^image_proj\.proj\.3\.": "an IP-Adapter Full, which has a token for each patch",
    r"^image_proj\.proj\.[02]\.": "an IP-Adapter FaceID, which reads embeddings of faces",
}
_PLAIN, _PLUS = f"{IMAGE}proj.weight", f"{IMAGE}latents"  # keys that only one kind has
_REMEDY = "give a plain or plus IP-Adapter"


@dataclass(frozen=True)
class StoredIPAdapter:
    """The tensors of an IP-Adapter file, and the sizes that they show."""

    source: str  # its name in errors
    tensors: Mapping[str, Tensor]  # by keys such as image_proj.latents and ip_adapter.1.to_k_ip.weight
    kind: Literal["plain", "plus"]
    tokens: int  # for each picture
    image_width: int  # of what the image encoder gives
    text_width: int  # of the tokens
    width: int = 0  # of a plus adapter's own tokens, and of its attentions' heads together
    inner_width: int = 0
    mlp_width: int = 0
    depth: int = 0

    @property
    def heads(self) -> int:
        return self.inner_width // _HEAD


def read_ip_adapter(given: Any) -> StoredIPAdapter:
    """Read an IP-Adapter.

    Args:
        given: a file, or the dict `{"image_proj": {...}, "ip_adapter": {...}}` that it holds.

    Raises:
        InputError: for a file that is damaged, that is no IP-Adapter, or an IP-Adapter of another kind.
    """
    source = "IP-Adapter" if isinstance(given, Mapping) else str(given)
    if isinstance(given, Mapping):
        tensors = _flat(given, source)
    elif isinstance(given, Path):
        tensors = _flat(_unpickled(given), source) if given.suffix.lower() in _PICKLES else _safe(given)
    else:
        raise InputError(f"IP-Adapter: {shown(given)} is neither a file nor a dict; give one")
    return _described(source, tensors)


def _described(source: str, tensors: dict[str, Tensor]) -> StoredIPAdapter:
    tensors = {key: each for key, each in tensors.items() if key.startswith((IMAGE, LAYERS))}
    if not tensors:
        raise InputError(f"{source} is no IP-Adapter: it has no image_proj and ip_adapter; {_REMEDY}")
    for pattern, kind in _REFUSED.items():
        if any(re.search(pattern, key) for key in tensors):
            raise InputError(f"{source} is {kind}; fastdiff does not run it; {_REMEDY}")
    if _PLAIN not in tensors and _PLUS not in tensors:
        raise InputError(f"{source} is no IP-Adapter that fastdiff knows: it has no {_PLAIN} and no {_PLUS}; {_REMEDY}")

    def size(key: str, dimension: int) -> int:
        tensor = tensors.get(IMAGE + key)
        if tensor is None or tensor.ndim <= dimension or not tensor.numel():
            raise InputError(
                f"{source} is damaged: its {IMAGE}{key} is missing or has another shape; download it again"
            )
        return tensor.shape[dimension]

    if _PLAIN in tensors:
        text_width = size("norm.weight", 0)
        tokens = max(1, size("proj.weight", 0) // text_width)
        return StoredIPAdapter(source, tensors, "plain", tokens, size("proj.weight", 1), text_width)
    layers = {match[1] for key in tensors if (match := re.match(r"image_proj\.layers\.(\d+)\.", key))}
    if len(layers) > MAX_LAYERS:
        raise InputError(f"{source}: it has {len(layers)} layers, and fastdiff takes {MAX_LAYERS}; {_REMEDY}")
    inner = size("layers.0.0.to_q.weight", 0)
    if inner % _HEAD:
        raise InputError(f"{source}: its attentions have {inner} channels, which is no multiple of {_HEAD}; {_REMEDY}")
    return StoredIPAdapter(
        source,
        tensors,
        "plus",
        tokens=size("latents", 1),
        image_width=size("proj_in.weight", 1),
        text_width=size("proj_out.weight", 0),
        width=size("latents", 2),
        inner_width=inner,
        mlp_width=size("layers.0.1.1.weight", 0),
        depth=len(layers),
    )


def _flat(given: Mapping[Any, Any], source: str) -> dict[str, Tensor]:
    """Return the tensors of both parts by keys as in a safetensors file."""
    flat: dict[str, Any] = {}
    for part, value in given.items():
        if isinstance(value, Mapping):
            flat |= {f"{part}.{key}": each for key, each in value.items()}
        else:
            flat[str(part)] = value
    odd = [key for key, each in flat.items() if not isinstance(each, Tensor) or each.layout != torch.strided]
    if odd:
        raise InputError(f"{source}: its {shown(odd[0])} is no plain tensor; {_REMEDY}")
    return flat


def _safe(path: Path) -> dict[str, Tensor]:
    header = checked_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in header.tensors}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is damaged ({reason}); download it again") from None


def _unpickled(path: Path) -> Mapping[Any, Any]:
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the file of an IP-Adapter")
    found = load_pickle(path, "give the safetensors file")
    if not isinstance(found, Mapping):
        raise InputError(f"{path} holds no dictionary of tensors; {_REMEDY}")
    return found

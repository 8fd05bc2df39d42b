"""Read the files of IP-Adapters (Ye et al. 2023, arXiv 2308.06721), and refuse what is not one by its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.checkpoints.single_files.ip_adapter_sizes import IMAGE, LAYERS, REMEDY, IPAdapterSizes, sizes_of
from fastdiff.checkpoints.single_files.reading import checked_header
from fastdiff.checkpoints.weights import load_pickle
from fastdiff.errors import InputError

_PICKLES = (".bin", ".ckpt", ".pt", ".pth")


@dataclass(frozen=True, kw_only=True)
class StoredIPAdapter(IPAdapterSizes):
    """The tensors of an IP-Adapter file, and the sizes that they show."""

    tensors: Mapping[str, Tensor]  # by keys such as image_proj.latents and ip_adapter.1.to_k_ip.weight


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
    sizes = sizes_of(source, {key: tuple(each.shape) for key, each in tensors.items()})
    own = {key: each for key, each in tensors.items() if key.startswith((IMAGE, LAYERS))}
    return StoredIPAdapter(**vars(sizes), tensors=own)


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
        raise InputError(f"{source}: its {shown(odd[0])} is no plain tensor; {REMEDY}")
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
        raise InputError(f"{path} holds no dictionary of tensors; {REMEDY}")
    return found

"""Read the tensors of one part of a single file, by diffusers' names. They are views of the file, not copies."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.checkpoints import weight_files
from fastdiff.checkpoints.single_files.keys import shapes_of, sources
from fastdiff.checkpoints.single_files.reading import checked_header, is_pickle
from fastdiff.checkpoints.weight_files import Header, InFile, Shapes, StoredTensor
from fastdiff.checkpoints.weights import is_plain, load_pickle
from fastdiff.errors import InputError

SHOWN = 3  # keys in an error
OTHER_SIZE = "for a model of another size, give the folder of its configs with --config (config in Python)"
OTHER_CONTROLNET = (
    "for one of another size, give the folder of its config to ControlNetModel.from_single_file as config"
)
_PICKLED = "save its tensors as safetensors"


def read_shapes(inside: InFile, config: Any) -> Shapes:
    """Return the shapes of a part's tensors by diffusers' names, from the header. Raises InputError as `read_part`."""
    stored = {key: tensor.shape for key, tensor in stored_header(inside.path).tensors.items()}
    found = sources(inside, stored, config)
    missing = [source.key for source in found.values() if source.key not in stored]
    if missing:
        raise InputError(f"{inside.path} has no {_some(missing)}; leave extract_ema out")
    return shapes_of(found, stored)


def read_part(inside: InFile, config: Any) -> dict[str, Tensor]:
    """Return the tensors of a part, on the CPU, by diffusers' names. Raises InputError for a damaged file."""
    if is_pickle(inside.path):
        pickled = read_pickle(inside.path)
        found = sources(inside, pickled, config)
        return {name: source.of(pickled[source.key]) for name, source in found.items()}
    try:
        with safe_open(inside.path, framework="pt") as file:
            found = sources(inside, file.keys(), config)
            return {name: source.of(file.get_tensor(source.key)) for name, source in found.items()}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{inside.path} is damaged ({reason}); download it again") from None


def stored_header(path: Path) -> Header:
    """Return the header of a single file, or the same for a pickle. Raises InputError for a damaged file."""
    if not is_pickle(path):
        return checked_header(path)
    pickled = read_pickle(path)
    return Header({key: StoredTensor(tuple(each.shape), str(each.dtype), None) for key, each in pickled.items()}, {}, 0)


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle by key, on the CPU. Other entries are left out.

    Checkpoints of training hold them below `state_dict`. None of the pickle's code runs. Raises InputError for a pickle
    that needs its code, and for a damaged one.
    """
    weight_files.check_archive(path)
    found = load_pickle(path, _PICKLED, is_mapped=zipfile.is_zipfile(path))
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping):
        raise InputError(f"{path} holds no dictionary of tensors; {_PICKLED}")
    return {
        key: each for key, each in found.items() if isinstance(key, str) and isinstance(each, Tensor) and is_plain(each)
    }


def check_shapes(
    there: Mapping[str, tuple[int, ...]], wanted: Mapping[str, torch.Size], source: str, remedy: str = OTHER_SIZE
) -> None:
    """Raise InputError that begins with `source` if the file's tensors are not the model's. It names a few keys.

    remedy: the end of the error.
    """
    missing = [key for key in wanted if key not in there]
    unknown = [key for key in there if key not in wanted]
    differing = [key for key in wanted if key in there and there[key] != tuple(wanted[key])]
    other = [f"{key} {there[key]} for {tuple(wanted[key])}" for key in differing]
    complaints = {"missing": missing, "unknown": unknown, "of another shape": other}
    listed = "; ".join(f"{what}: {_some(keys)}" for what, keys in complaints.items() if keys)
    if listed:
        raise InputError(f"{source}: {listed}; {remedy}")


def _some(keys: list[str]) -> str:
    first = ", ".join(f"{key if key.isprintable() else shown(key):.120}" for key in keys[:SHOWN])
    return first if len(keys) <= SHOWN else f"{first} and {len(keys) - SHOWN} more"

"""Read the tensors of one part of a single file, by diffusers' names. They are views of the file, not copies."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.checkpoints import weight_files
from fastdiff.checkpoints.single_files.keys import shapes_of, sources
from fastdiff.checkpoints.weight_files import InFile, Shapes
from fastdiff.errors import InputError

SHOWN = 3  # keys in an error
OTHER_SIZE = "for a model of another size, give the folder of its configs with --config (config in Python)"


def read_shapes(inside: InFile, config: Any) -> Shapes:
    """Return the shapes of a part's tensors by diffusers' names, from the header. Raises InputError as `read_part`."""
    stored = {key: tensor.shape for key, tensor in weight_files.read_header(inside.path).tensors.items()}
    found = sources(inside, stored, config)
    missing = [source.key for source in found.values() if source.key not in stored]
    if missing:
        raise InputError(f"{inside.path} has no {_some(missing)}; leave extract_ema out")
    return shapes_of(found, stored)


def read_part(inside: InFile, config: Any) -> dict[str, Tensor]:
    """Return the tensors of a part, on the CPU, by diffusers' names. Raises InputError for a damaged file."""
    try:
        with safe_open(inside.path, framework="pt") as file:
            found = sources(inside, file.keys(), config)
            return {name: source.of(file.get_tensor(source.key)) for name, source in found.items()}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{inside.path} is damaged ({reason}); download it again") from None


def check_shapes(there: Mapping[str, tuple[int, ...]], wanted: Mapping[str, torch.Size], source: str) -> None:
    """Raise InputError that begins with `source` if the file's tensors are not the model's. It names a few keys."""
    missing = [key for key in wanted if key not in there]
    unknown = [key for key in there if key not in wanted]
    differing = [key for key in wanted if key in there and there[key] != tuple(wanted[key])]
    other = [f"{key} {there[key]} for {tuple(wanted[key])}" for key in differing]
    complaints = {"missing": missing, "unknown": unknown, "of another shape": other}
    listed = "; ".join(f"{what}: {_some(keys)}" for what, keys in complaints.items() if keys)
    if listed:
        raise InputError(f"{source}: {listed}; {OTHER_SIZE}")


def _some(keys: list[str]) -> str:
    first = ", ".join(f"{key:.120}" for key in keys[:SHOWN])
    return first if len(keys) <= SHOWN else f"{first} and {len(keys) - SHOWN} more"

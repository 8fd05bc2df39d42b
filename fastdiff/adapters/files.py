"""Read a LoRA file, and refuse what is not one. Every key, shape and number of a file is checked before it is used."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.adapters.building import build
from fastdiff.adapters.headers import refusal
from fastdiff.adapters.names import PEFT_PREFIX, TRANSFORMER, Homes, role_of
from fastdiff.adapters.updates import Update
from fastdiff.arguments import shown
from fastdiff.checkpoints.json_files import parse_json, read_json
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.reading import SUFFIXES, checked_header, read_single_file
from fastdiff.checkpoints.weight_files import Shapes
from fastdiff.errors import InputError, NonFiniteWeightsError

SHOWN = 3  # keys in an error
METADATA = "lora_adapter_metadata"  # diffusers' entry in a file's metadata: peft's configs, as JSON
PEFT_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Adapter:
    """A LoRA file that was read."""

    source: str  # its name in errors
    parts: Mapping[str, Mapping[str, Update]]  # part of the pipeline -> diffusers' key of a weight -> its update


@dataclass(frozen=True)
class Stored:
    """The tensors of a file, and peft's config of each part by its prefix ("" for all parts)."""

    source: str
    tensors: Mapping[str, Tensor]
    configs: Mapping[str, Mapping[str, Any]]


def read_adapter(given: Any, weight_name: str | None, shapes: Mapping[str, Shapes], config: Any) -> Adapter:
    """Read a LoRA for a pipeline.

    Args:
        given: a safetensors file, a folder with one, or a dict of tensors.
        weight_name: the name of the file in the folder.
        shapes: the shapes of each part's weights, by diffusers' keys.
        config: of the U-Net, or of Z-Image's transformer.

    Raises:
        InputError: names the keys and the reason. NonFiniteWeightsError for NaN or infinity.
    """
    stored = of_dict(given) if isinstance(given, Mapping) else of_file(find_file(given, weight_name))
    _check_kind(stored)
    base = kinds.Z_IMAGE if TRANSFORMER in shapes else kinds.BY_CONTEXT.get(config.text_width)
    layers = _by_layer(stored, Homes(shapes, config), base)
    parts: dict[str, dict[str, Update]] = {}
    for (part, weight), tensors in layers.items():
        options = stored.configs.get(part) or stored.configs.get("") or {}
        name = f"{stored.source}: {part}.{weight.removesuffix('.weight')}"
        parts.setdefault(part, {})[weight] = build(name, tensors, shapes[part][weight], options, weight)
    _check_finite(stored)
    return Adapter(stored.source, parts)


def find_file(given: Any, weight_name: str | None) -> Path:
    """Return the file of a LoRA. Raises InputError if a folder holds none, or several and none is named."""
    if not isinstance(given, str | Path):
        raise InputError(f"LoRA: {shown(given)} is not a file; give a safetensors file, its folder or a dict")
    path = Path(given)
    if not path.is_dir():
        if weight_name is not None and not path.exists():
            raise InputError(f"{path} does not exist; give a safetensors file, or a folder that holds {weight_name}")
        return path
    if weight_name is not None:
        return path / weight_name
    found = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES)
    if len(found) != 1:
        names = ", ".join(each.name for each in found[:SHOWN]) or "no safetensors file"
        raise InputError(f"{path} holds {names}; give the name of the LoRA's file as weight_name")
    return found[0]


def of_file(path: Path) -> Stored:
    """Return the tensors of a file. Raises InputError for a file that is damaged or no LoRA."""
    header = checked_header(path)
    if not any(role_of(key) or refusal(key) for key in header.tensors):
        raise InputError(_no_lora(path))
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in header.tensors}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is damaged ({reason}); download it again") from None
    return Stored(str(path), tensors, _configs(path, tensors, header.metadata))


def of_dict(tensors: Mapping[str, Any]) -> Stored:
    """Return the tensors of a dict. Raises InputError for other values."""
    odd = [key for key, value in tensors.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if odd:
        raise InputError(f"LoRA: {_some(odd)} of the dict is not a tensor by its name; give tensors alone")
    if not tensors:
        raise InputError("LoRA: the dict is empty; give the tensors of a LoRA")
    return Stored("LoRA", dict(tensors), {})


def _configs(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return peft's configs, from the file's metadata or from the folder that peft saved."""
    if METADATA in metadata:
        try:
            flat = parse_json(metadata[METADATA])
        except ValueError as error:
            raise InputError(f"{path}: its {METADATA} is not JSON ({error}); save the LoRA again") from None
        configs: dict[str, dict[str, Any]] = {}
        for key, value in flat.items() if isinstance(flat, dict) else ():
            part, _, option = key.partition(".")
            configs.setdefault(part, {})[option] = value
        return configs
    beside = path.parent / PEFT_CONFIG
    is_from_peft = any(key.startswith(PEFT_PREFIX) for key in tensors)
    return {"": read_json(beside)} if is_from_peft and beside.is_file() else {}


def _no_lora(path: Path) -> str:
    try:
        kind = read_single_file(path).kind
    except InputError:
        return f"{path} holds no keys of a LoRA; give a LoRA"
    return f"{path} is no LoRA but a {kind.removeprefix('a ')}; give it as the model, or give a LoRA"


def _check_kind(stored: Stored) -> None:
    """Raise InputError for a kind of adapter that is not read, and for a dict without any key of a LoRA."""
    for key in stored.tensors:
        reason = refusal(key)
        if reason is not None:
            raise InputError(f"{stored.source}: {_some([key])} is of {reason}")
    if not any(map(role_of, stored.tensors)):
        raise InputError(f"{stored.source}: {_some(list(stored.tensors))} are no keys of a LoRA; give a LoRA")


def _by_layer(stored: Stored, homes: Homes, base: str | None) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Return the tensors of each layer by their role. Raises InputError for a key that no layer has.

    As in diffusers, a layer that is there under diffusers' name and under its authors' counts once.
    """
    places = {key: homes.find(key) for key in stored.tensors}
    plain = {place[:3] for each in places.values() for place in each if not place.is_authors}
    found: dict[tuple[str, ...], str] = {}
    layers: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, there in places.items():
        is_again = any(place.is_authors and place[:3] in plain for place in there)
        for place in () if is_again else there:
            if place[:3] in found:
                raise InputError(
                    f"{stored.source}: {_some([found[place[:3]]])} and {_some([key])} name the same layer; remove one"
                )
            found[place[:3]] = key
            layers.setdefault(place[:2], {})[place.role] = place.rows(stored.tensors[key])
    unknown = [key for key, there in places.items() if not there]
    of = kinds.base_of_lora(stored.tensors)
    if of is not None and base is not None and of != base:
        raise InputError(f"{stored.source} is a LoRA of {of}, and the model is {base}; give a LoRA of {base}")
    if unknown:
        model = f"this model ({base})" if base else "this model"
        raise InputError(f"{stored.source}: {_some(unknown)} have no layer in {model}; give a LoRA of this model")
    return layers


def _check_finite(stored: Stored) -> None:
    """Raise NonFiniteWeightsError for NaN or infinity in any tensor."""
    tensors = {key: each for key, each in stored.tensors.items() if each.numel()}
    extremes = [torch.stack(each.float().aminmax()) for each in tensors.values()]
    found = torch.stack(extremes).isfinite().all(dim=1).tolist() if extremes else []  # waits once for a GPU
    broken = [key for key, is_finite in zip(tensors, found, strict=True) if not is_finite]
    if broken:
        raise NonFiniteWeightsError(f"{stored.source}: NaN or infinity in {_some(broken)}; use another LoRA")


def _some(keys: list[Any]) -> str:
    plain = (isinstance(key, str) and key.isprintable() for key in keys[:SHOWN])
    first = ", ".join(f"{key if is_plain else shown(key):.120}" for key, is_plain in zip(keys, plain, strict=False))
    return first if len(keys) <= SHOWN else f"{first} and {len(keys) - SHOWN} more ({len(keys)} keys)"

"""Load LoRAs into diffusers' pipeline for `fastdiff verify --lora`: with peft, or by hand if diffusers misreads a file.

For Stable Diffusion, diffusers takes the most frequent alpha of a file for all layers, and drops layers whose names it
does not know. There the weights are merged by hand from the file's own numbers, and the verification says so.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.adapters.headers import LoraFile, describe
from fastdiff.adapters.names import PARTS, TRANSFORMER, UNET, parse
from fastdiff.checkpoints.single_files.kinds import Z_IMAGE
from fastdiff.errors import InputError, in_one_line
from fastdiff.requests.file_option import FileOption, weight_of
from fastdiff.requests.request import Request

if TYPE_CHECKING:
    from torch import Tensor

_METADATA = "lora_adapter_metadata"  # with it, diffusers knows the alpha of every layer
_LDM = ("input_blocks_", "middle_block_", "output_blocks_")


def add_loras(theirs: Any, request: Request, config: Any) -> list[str]:
    """Load the LoRAs of a request into diffusers' pipeline. Return a line for each that says how.

    Raises InputError for a file that is no LoRA of this model.
    """
    options = [FileOption.parse(text) for text in request.lora]
    reasons = {option.path: misreading(option.path) for option in options}
    if not any(reasons.values()):
        reasons |= _load_with_peft(theirs, options, config)
    if not any(reasons.values()):
        return [f"lora {option.path}, weight {weight_of(option):g}: loaded by diffusers and peft" for option in options]
    _merge(theirs, options, config)
    together = "another LoRA needs it"
    return [
        f"lora {option.path}, weight {weight_of(option):g}: merged by hand, because {reasons[option.path] or together}"
        for option in options
    ]


def misreading(path: str) -> str | None:
    """Return why diffusers reads a LoRA file differently from what it means, or None. Raises InputError for others."""
    file = describe(path)
    if not isinstance(file, LoraFile):
        raise InputError(f"{path} is no LoRA; give a LoRA")
    if file.refusal is not None:
        raise InputError(f"{path}: {file.refusal}")
    parsed = [each for each in map(parse, file.file.header.tensors) if each is not None]
    if "LoHa" in file.kind or "LoKr" in file.kind:
        return f"diffusers does not read {file.kind}"
    if any(each.part is None for each in parsed):
        return "diffusers drops keys that do not name their model"
    if any(each.role == "magnitude" and each.part not in (UNET, TRANSFORMER) for each in parsed):
        return "diffusers does not load the DoRA magnitudes of text encoders"
    if any(each.module.startswith(_LDM) for each in parsed):
        return "diffusers drops some of LDM's names of layers"
    if file.base == Z_IMAGE:  # each layer keeps its alpha
        return None
    if _METADATA not in file.file.header.metadata and not _has_one_alpha(Path(path), file):
        return "diffusers takes one alpha for all layers, and the file has several"
    return None


def _has_one_alpha(path: Path, file: LoraFile) -> bool:
    """Return whether each layer has the same alpha. Without alpha, a layer's alpha is its rank."""
    from safetensors import safe_open

    alphas, ranks = {}, {}
    with safe_open(path, framework="pt") as stored:
        for key, tensor in file.file.header.tensors.items():
            parsed = parse(key)
            if parsed is not None and parsed.role == "alpha":
                alphas[parsed.part, parsed.module] = float(stored.get_tensor(key).flatten()[0])
            elif parsed is not None and parsed.role == "down":
                ranks[parsed.part, parsed.module] = tensor.shape[0]
    return len({alphas.get(layer, rank) for layer, rank in ranks.items()}) == 1


def _load_with_peft(theirs: Any, options: Sequence[FileOption], config: Any) -> Mapping[str, str]:
    """Load LoRAs with peft. If diffusers refuses one or drops layers, load none and return the reason by its file."""
    wanted = {option.path: _layers(theirs, option.path, config) for option in options}
    names = [f"lora_{i}" for i in range(len(options))]
    for name, option in zip(names, options, strict=True):
        reason = None
        try:
            theirs.load_lora_weights(option.path, adapter_name=name)
        except Exception as error:
            reason = f"diffusers cannot load it ({in_one_line(error)})"
        else:
            count = sum(name in getattr(module, "lora_A", ()) for module in _modules(theirs))
            if count != len(wanted[option.path]):
                reason = f"diffusers loads {count} of its {len(wanted[option.path])} layers"
        if reason is not None:
            with contextlib.suppress(Exception):
                theirs.unload_lora_weights()
            return {option.path: reason}
    theirs.set_adapters(names, [weight_of(option) for option in options])
    return {}


def _parts(theirs: Any) -> dict[str, Any]:
    names = (TRANSFORMER,) if hasattr(theirs, TRANSFORMER) else PARTS
    return {name: part for name in names if (part := getattr(theirs, name, None)) is not None}


def _modules(theirs: Any) -> Iterator[Any]:
    for part in _parts(theirs).values():
        yield from part.modules()


def _weights(theirs: Any) -> dict[str, dict[str, "Tensor"]]:
    """Return the weights that LoRAs may change, by part and key."""
    return {
        name: {key: each for key, each in part.named_parameters() if key.endswith(".weight") and each.ndim > 1}
        for name, part in _parts(theirs).items()
    }


def _layers(theirs: Any, path: str, config: Any) -> dict[tuple[str, str], Any]:
    """Return the update of each layer of a file, by part and key."""
    from fastdiff.adapters.files import read_adapter

    shapes = {part: {key: tuple(each.shape) for key, each in keys.items()} for part, keys in _weights(theirs).items()}
    adapter = read_adapter(path, None, shapes, config)
    return {(part, key): update for part, updates in adapter.parts.items() for key, update in updates.items()}


def _merge(theirs: Any, options: Sequence[FileOption], config: Any) -> None:
    """Merge LoRAs into diffusers' weights, in float32."""
    import torch

    found = [(weight_of(option), _layers(theirs, option.path, config)) for option in options]
    weights = _weights(theirs)
    with torch.no_grad():
        for part, key in dict.fromkeys(place for _, layers in found for place in layers):
            weight = weights[part][key]
            total = weight.float().flatten(1).clone()
            for factor, layers in found:
                if (part, key) in layers:
                    layers[part, key].add_to(total, weight.float().flatten(1), factor)
            weight.copy_(total.view_as(weight))

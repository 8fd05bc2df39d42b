"""Build the update of one layer from the tensors of a file, and check that they fit one another and the layer."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastdiff.adapters.updates import DoRA, LoHa, LoKr, LoRA, Update
from fastdiff.errors import InputError

MAX_RANK = 16_384  # more than the width of any layer that we run

_LOHA = ("w1_a", "w1_b", "w2_a", "w2_b")
_LOKR = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")


def build(
    name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], config: Mapping[str, Any], weight: str
) -> Update:
    """Return the update of a layer.

    Args:
        name: the layer's name in errors.
        tensors: the file's tensors of the layer, by their role in `names.Place`.
        shape: of the weight that is changed.
        config: peft's config of the part, or nothing.
        weight: diffusers' key of the weight, for the patterns of the config.

    Raises InputError for tensors that are missing or do not fit.
    """
    odd = [role for role, each in tensors.items() if not each.is_floating_point() and role != "alpha"]
    if odd:
        raise InputError(f"{name}: {odd[0]} is {tensors[odd[0]].dtype}, not floating point; use another file")
    alpha = _alpha(name, tensors, config, weight)
    roles = tensors.keys() - {"alpha"}
    if roles & {"down", "up"}:
        return _lora(name, tensors, shape, alpha, rank_stabilised=config.get("use_rslora") is True)
    if roles & {*_LOHA}:
        return _loha(name, tensors, shape, alpha)
    if any(role.startswith("lokr_") for role in roles):
        return _lokr(name, tensors, shape, alpha)
    raise InputError(f"{name}: the file has only its {', '.join(sorted(tensors))}; use another file")


def _alpha(name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], weight: str) -> float | None:
    """Return the alpha of a layer. None: the rank. An alpha of 0 means None for kohya's trainers."""
    if "alpha" in tensors:
        if tensors["alpha"].numel() != 1:
            raise InputError(f"{name}: its alpha has {tensors['alpha'].numel()} numbers; use another file")
        if tensors["alpha"].is_complex():
            raise InputError(f"{name}: its alpha is a complex number; use another file")
        return float(tensors["alpha"]) or None
    value = _matching(config.get("alpha_pattern"), weight, config.get("lora_alpha", config.get("alpha")))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name}: its alpha in the config is {value!r}; give a number")
    return float(value)


def _matching(patterns: Any, weight: str, usual: Any) -> Any:
    """Return the entry of peft's `patterns` for a layer, or else the usual value. The last part of a name may match."""
    layer = weight.removesuffix(".weight")
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if layer == pattern.lstrip("^") or _matches(pattern, layer):
            return value
    return usual


def _matches(pattern: str, layer: str) -> bool:
    try:
        return re.match(rf"(?:.*\.)?(?:{pattern})$", layer) is not None
    except re.error:
        return False


def _lora(
    name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], alpha: float | None, *, rank_stabilised: bool
) -> LoRA:
    _check_roles(name, tensors, {"down", "up"}, {"alpha", "mid", "magnitude"})
    down, up, mid = tensors["down"], tensors["up"], tensors.get("mid")
    if down.ndim < 2 or up.ndim < 2:
        raise InputError(f"{name}: down {_size(down)} and up {_size(up)} are no matrices; use another file")
    down, up = down.flatten(1), up.flatten(1)
    rank = _checked_rank(name, len(down), up.shape[1])
    wanted = math.prod(shape[1:]) if mid is None else shape[1]
    if mid is not None and mid.shape != (rank, rank, *shape[2:]):
        raise InputError(f"{name}: mid is {_size(mid)} for rank {rank} and a filter {shape}; use another file")
    _check_size(name, (len(up), down.shape[1]), (shape[0], wanted), shape)
    scale = 1.0 if alpha is None else alpha / (math.sqrt(rank) if rank_stabilised else rank)
    magnitude = tensors.get("magnitude")
    if magnitude is None:
        return LoRA(down, up, scale, mid)
    if magnitude.numel() != shape[0]:
        raise InputError(f"{name}: lora_magnitude_vector is {_size(magnitude)} for {shape[0]} outputs; use another")
    return DoRA(down, up, scale, mid, magnitude.flatten())


def _loha(name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], alpha: float | None) -> LoHa:
    _check_roles(name, tensors, {*_LOHA}, {"alpha", "t1", "t2"})
    if ("t1" in tensors) != ("t2" in tensors):
        raise InputError(f"{name}: it needs both hada_t1 and hada_t2; use another file")
    for half in ("1", "2"):
        left, right, core = (tensors.get(each) for each in (f"w{half}_a", f"w{half}_b", f"t{half}"))
        assert left is not None and right is not None
        if left.ndim != 2 or right.ndim != 2:
            raise InputError(f"{name}: hada_w{half} is {_size(left)} and {_size(right)}, no matrices; use another file")
        rank = _checked_rank(name, len(right), left.shape[0 if core is not None else 1])
        if core is not None and core.shape != (rank, rank, *shape[2:]):
            raise InputError(f"{name}: hada_t{half} is {_size(core)} for rank {rank} and a filter {shape}; use another")
        outputs = left.shape[1] if core is not None else len(left)
        inputs = shape[1] if core is not None else math.prod(shape[1:])
        _check_size(name, (outputs, right.shape[1]), (shape[0], inputs), shape)
    rank = len(tensors["w1_b"])
    scale = 1.0 if alpha is None else alpha / rank
    return LoHa(scale=scale, **{role: tensors[role] for role in _LOHA}, t1=tensors.get("t1"), t2=tensors.get("t2"))


def _lokr(name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], alpha: float | None) -> LoKr:
    given = {role.removeprefix("lokr_"): each for role, each in tensors.items() if role != "alpha"}
    for half in ("w1", "w2"):
        needed = {half} if half in given else {f"{half}_a", f"{half}_b"}
        if not needed <= given.keys() or (half in given and given.keys() & {f"{half}_a", f"{half}_b"}):
            raise InputError(f"{name}: it needs lokr_{half}, or lokr_{half}_a and lokr_{half}_b; use another file")
        if half not in given:
            core = given.get("t2") if half == "w2" else None
            left, right = given[f"{half}_a"], given[f"{half}_b"]
            if min(left.ndim, right.ndim) < 2 or (core is not None and core.ndim != 4):
                raise InputError(f"{name}: lokr_{half}_a is {_size(left)}, no matrix; use another file")
            if core is None:
                given[f"{half}_b"] = right = right.flatten(1)
            rank = _checked_rank(name, len(right), left.shape[0 if core is not None else 1])
            if core is not None and core.shape[:2] != (rank, rank):
                raise InputError(f"{name}: lokr_t2 is {_size(core)} for rank {rank}; use another file")
    if "t2" in given and "w2" in given:
        raise InputError(f"{name}: it has both lokr_w2 and lokr_t2; use another file")
    if (given.get("w1") is not None and given["w1"].ndim != 2) or (
        given.get("w2") is not None and given["w2"].ndim < 2
    ):
        raise InputError(f"{name}: lokr_w1 and lokr_w2 are no matrices; use another file")
    update = LoKr(1.0, **{role: given.get(role) for role in _LOKR})
    _check_size(name, update.shape, (shape[0], math.prod(shape[1:])), shape)
    is_whole = "w1" in given and "w2" in given  # LyCORIS then ignores alpha
    ranks = [len(given[each]) for each in ("w1_b", "w2_b") if each in given]
    scale = 1.0 if alpha is None or is_whole else alpha / ranks[0]
    return LoKr(scale, **{role: given.get(role) for role in _LOKR})


def _check_roles(name: str, tensors: Mapping[str, Tensor], needed: set[str], optional: set[str]) -> None:
    missing, odd = sorted(needed - tensors.keys()), sorted(tensors.keys() - needed - optional)
    if missing:
        raise InputError(f"{name}: the file has {', '.join(sorted(tensors))} but no {missing[0]}; use another file")
    if odd:
        raise InputError(f"{name}: the file has {odd[0]} beside {sorted(needed)[0]}; use another file")


def _checked_rank(name: str, rank: int, other: int) -> int:
    if rank != other:
        raise InputError(f"{name}: its two matrices have ranks {rank} and {other}; use another file")
    if not 1 <= rank <= MAX_RANK:
        raise InputError(f"{name}: its rank is {rank}; the most is {MAX_RANK}")
    return rank


def _check_size(name: str, size: tuple[int, int], wanted: tuple[int, int], shape: tuple[int, ...]) -> None:
    if size != wanted:
        raise InputError(
            f"{name}: it changes {size[0]} x {size[1]} numbers, and the model has {shape}; use a LoRA of this model"
        )


def _size(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))

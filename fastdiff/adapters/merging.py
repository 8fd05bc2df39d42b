"""Merge adapters into the weights of a loaded model, in place: kernels and CUDA graphs read the same memory as before.

W + sum of factor_i * scale_i * delta_i is computed in float32 from the weight W as it was loaded, rounded once, and
copied over the weight. The loaded weights that an adapter touches are kept, so that the very bits come back. They take
as much memory as these weights, on the model's device. Weights in 8 bits are left to `eight_bits`.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from fastdiff.adapters.eight_bits import EightBits
from fastdiff.adapters.factors import ONE, Factor
from fastdiff.adapters.updates import LoRA, Recipe, Update
from fastdiff.checkpoints.weights import diffusers_keys, split_stacked
from fastdiff.errors import NonFiniteWeightsError
from fastdiff.execution.devices import dtype_name
from fastdiff.execution.tensors import count_writes
from fastdiff.kernels.merge_lora import LowRank, merge_lora

Updates = Mapping[str, Update]  # by diffusers' key of the weight
_LARGEST = torch.finfo(torch.float32).max
_UNKNOWN: Recipe = ((Update(), 0.0),)  # equals no recipe


class Merging:
    """The adapters of one model. All changes wait for `write`, which computes only the weights that change."""

    def __init__(self, model: Any):
        """Begin without adapters. `model` is a `Model`. Raises InputError as `EightBits`."""
        self._model = model
        self._in_8_bits = EightBits(model, _merged)
        # diffusers' key -> our parameter, which may stack several
        self._names = {key: name for name in model.state_dict() for key in diffusers_keys(model, name)}
        self.adapters: dict[str, Updates] = {}
        self.active: dict[str, Factor] = {}  # in the order in which they are added
        self.is_enabled = True
        self.scale = 1.0  # of a call, for all active adapters
        self.of_prompt: Mapping[str, Factor] = {}  # the adapters that the prompt of a call names; they are active too
        self.fused: dict[str, tuple[Updates, Factor]] = {}  # by adapter; the layers of these ignore `active`
        self._loaded: dict[str, Tensor] = {}  # our parameters as they were loaded, if an adapter has touched them
        self._written: dict[str, Recipe] = {}  # by diffusers' key
        self._parameters = dict(model.named_parameters())
        self._places: dict[str, tuple[Any, ...]] = {}  # by diffusers' key: the parameter's address, and two views
        self._generation = 0  # counts changes of the updates themselves
        self.own_writes = 0  # to the model's parameters, as `count_writes` counts

    @property
    def state(self) -> Hashable:
        """Identify what the merged weights depend on. Equal states mean equal weights."""
        active = tuple(self._used().items())
        fused = tuple((name, factor) for name, (_, factor) in self.fused.items())
        return self._generation, fused, active, self.scale if active else 1.0

    def snapshot(self) -> dict[str, Any]:
        """Return the adapters and how they are used, for `go_back_to`."""
        return {name: copy(vars(self)[name]) for name in ("adapters", "active", "is_enabled", "fused", "_generation")}

    def go_back_to(self, snapshot: dict[str, Any] | None) -> None:
        """Undo all changes since a snapshot; None: since the beginning."""
        vars(self).update(snapshot or {"adapters": {}, "active": {}, "is_enabled": True, "fused": {}})
        self.write()

    def scaled(self, scale: float, of_prompt: Mapping[str, Factor]) -> None:
        """Use the adapters that a prompt names, multiply the factors of the active adapters by `scale`, and write."""
        if scale != self.scale or of_prompt != self.of_prompt:
            self.scale, self.of_prompt = scale, of_prompt
            self.write()

    def _used(self) -> Mapping[str, Factor]:
        """Return the adapters of the call, and their factors without `scale`."""
        return {**self.active, **self.of_prompt} if self.is_enabled else {}

    def add(self, name: str, updates: Updates, *, keeps_active: bool = False) -> None:
        """Add an adapter, or replace the one of this name. Make it the only active one, unless told otherwise."""
        device = next(self._model.parameters()).device
        self.adapters[name] = {key: update.to(device) for key, update in updates.items()}
        if not keeps_active:
            self.active = {name: ONE}
        self._generation += 1

    def remove(self, names: Iterable[str]) -> None:
        """Forget adapters. What is fused stays fused."""
        for name in names:
            self.adapters.pop(name, None)
            self.active.pop(name, None)

    def fuse(self, names: Iterable[str], scale: float) -> None:
        """Keep adapters in the weights with their current factors, until `unfuse`."""
        for name in names:
            if name in self.adapters and name not in self.fused:
                self.fused[name] = self.adapters[name], self.active.get(name, ONE).times(scale)

    def keep_fused(self) -> None:
        """Make what is fused a part of the model for good. Its weights are then the model's own."""
        keys = {key for updates, _ in self.fused.values() for key in updates}
        self._in_8_bits.keep({key: self._written[key] for key in keys if key in self._in_8_bits})
        fused = {self._names.get(key, key) for key in keys}
        for name in fused:
            self._loaded.pop(name, None)
        self._places = {}
        self._written = {key: it for key, it in self._written.items() if self._names.get(key, key) not in fused}
        self.fused = {}
        self._generation += 1

    def _recipes(self) -> list[tuple[str, Recipe]]:
        """Return what is added to each weight that an adapter changes, now."""
        fused: dict[str, list[tuple[Update, float]]] = {}
        for updates, factor in self.fused.values():
            for key, update in updates.items():
                fused.setdefault(key, []).append((update, factor.of(key)))
        active: dict[str, list[tuple[Update, float]]] = {}
        for name, factor in self._used().items():
            for key, update in self.adapters.get(name, {}).items():
                active.setdefault(key, []).append((update, factor.of(key) * self.scale))
        return [(key, tuple(recipe)) for key, recipe in (active | fused).items()]

    def write(self) -> None:
        """Bring the model's weights up to date. After an error nothing has changed.

        Raises:
            NonFiniteWeightsError: a sum is beyond the range of the dtype, or a factor beyond float32's.
            InputError: for weights in 8 bits, as `EightBits.fetch`.
        """
        wanted = dict(self._recipes())
        changed = {key: wanted.get(key, ()) for key in self._written.keys() | wanted.keys()}
        changed = {key: recipe for key, recipe in changed.items() if recipe != self._written.get(key, ())}
        _check_range(changed.values())
        before = {key: self._written.get(key, ()) for key in changed}
        with torch.inference_mode(False), torch.no_grad(), self._counting():  # so that torch counts the writes
            self._in_8_bits.fetch(key for key, recipe in changed.items() if recipe)
            narrow = [each.aminmax() for each in self._write_all(changed)]
            if not narrow or torch.stack([torch.stack(each) for each in narrow]).isfinite().all():
                self._written = wanted
                return
            self._write_all({key: () if recipe is _UNKNOWN else recipe for key, recipe in before.items()})
        dtype = dtype_name(self._model.dtype)
        raise NonFiniteWeightsError(f"LoRA: a merged weight is beyond the range of {dtype}; use a smaller weight")

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the writes of the block as own ones."""
        before = count_writes(self._parameters.values())
        try:
            yield
        finally:
            after = count_writes(self._parameters.values())
            if before is not None and after is not None:
                self.own_writes += after - before

    def _write_all(self, recipes: Mapping[str, Recipe]) -> list[Tensor]:
        """Write weights. Return what may be beyond the range of its dtype: those in float16, and factors of 8-bit ones.

        Those that one launch can write are written together.
        """
        together: dict[Hashable, list[tuple[Tensor, Tensor, list[LowRank]]]] = {}
        written = []
        for key, recipe in recipes.items():
            if key in self._in_8_bits:
                written.append(self._in_8_bits.write(key, recipe))
                continue
            target, loaded = self._place(key)
            changes = _low_rank(target, loaded, recipe)
            if changes:
                together.setdefault((target.dtype, changes[0].up.dtype), []).append((target, loaded, changes))
            else:
                _write(target, loaded, recipe)
            if target.dtype == torch.float16:
                written.append(target)
        for group in together.values():
            merge_lora(*zip(*group, strict=True))
        return written

    def _place(self, key: str) -> tuple[Tensor, Tensor]:
        """Return views of our parameter and of what was loaded into it, for diffusers' key of a weight."""
        name = self._names[key]
        parameter = self._parameters[name]
        if name not in self._loaded:
            self._loaded[name] = parameter.detach().clone()
        address, *views = self._places.get(key, (None,))
        if address != parameter.data_ptr():
            keys = diffusers_keys(self._model, name)
            views = [split_stacked(each, keys)[key] for each in (parameter, self._loaded[name])]
            self._places[key] = parameter.data_ptr(), *views
        target, loaded = views
        return target, loaded

    def write_again(self) -> None:
        """Write all weights that adapters change, because the model's memory does not hold what was written last."""
        self._written = dict.fromkeys(self._written, _UNKNOWN)
        self.write()

    def follow_dtype(self) -> None:
        """Merge again from converted weights, if the model's dtype has changed."""
        self._parameters, self._places = dict(self._model.named_parameters()), {}
        for name, loaded in self._loaded.items():
            dtype = self._model.get_parameter(name).dtype
            if loaded.dtype != dtype:
                self._loaded[name] = loaded.to(dtype)
                self._written |= dict.fromkeys(diffusers_keys(self._model, name), _UNKNOWN)
        self._written |= dict.fromkeys(self._in_8_bits.follow_dtype(), _UNKNOWN)
        self.write()

    def as_loaded(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return a state dict of the model with the weights as they were loaded."""
        loaded = {prefix + name: each for name, each in (self._loaded | self._in_8_bits.loaded).items()}
        return state | {name: each.to(state[name].device) for name, each in loaded.items()}


def _write(target: Tensor, loaded: Tensor, recipe: Recipe) -> None:
    """Write one weight."""
    if not recipe:
        target.copy_(loaded)
        return
    scales = any(update.scales_weight for update, _ in recipe)
    weight = loaded.to(target.device, torch.float32, copy=True).reshape(len(loaded), -1) if scales else loaded
    total = weight.clone() if scales else torch.empty(len(target), target[0].numel(), device=target.device)
    for i, (update, factor) in enumerate(recipe):
        here = update if update.device == target.device else update.to(target.device)
        here.add_to(total, weight, factor, is_first=i == 0 and not scales)
    if scales:
        target.copy_(total.reshape(target.shape))
    else:
        torch.add(loaded.to(target.device), total.view(target.shape), out=target)  # in float32, rounded once


def _merged(loaded: Tensor, recipe: Recipe) -> Tensor:
    """Return a weight, (out, in) or (out, in, kh, kw), with what a recipe adds to it."""
    target = torch.empty_like(loaded)
    changes = _low_rank(target, loaded, recipe)
    if changes:
        merge_lora([target], [loaded], [changes])
    else:
        _write(target, loaded, recipe)
    return target


def _check_range(recipes: Iterable[Recipe]) -> None:
    """Raise NonFiniteWeightsError for an update whose scale times its factor is beyond the range of float32."""
    products = (vars(update).get("scale", 1.0) * factor for recipe in recipes for update, factor in recipe)
    if any(not abs(product) <= _LARGEST for product in products):
        raise NonFiniteWeightsError(
            "LoRA: its weight times its scale is beyond the range of float32; use a smaller one"
        )


def _low_rank(target: Tensor, loaded: Tensor, recipe: Recipe) -> list[LowRank] | None:
    """Return a recipe as changes for `merge_lora`, or None if that does not take them."""
    device = target.device
    if loaded.device != device or not target.is_contiguous() or target.shape[2:].numel() != 1:
        return None
    changes: list[LowRank] = []
    for update, factor in recipe:
        if type(update) is not LoRA or update.mid is not None or update.up.device != device:
            return None
        changes.append(LowRank(update.up, update.down, update.scale * factor))
        if not changes[0].up.dtype == update.up.dtype == update.down.dtype:
            return None
    return changes

"""Change weights in 8 bits: merge adapters into the weights from before quantisation, and quantise the sums again.

A model in 8 bits does not keep the weights that it was made from. When adapters touch some for the first time, they are
read from the model's files again. They stay on the CPU in the model's dtype, and so do the 8-bit weights without
adapters: 3 bytes for each weight in a 16-bit model.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastdiff.adapters.updates import Recipe
from fastdiff.checkpoints.quantisation import Origin
from fastdiff.checkpoints.weights import diffusers_keys, rename_old_attention_keys, split_stacked
from fastdiff.errors import InputError
from fastdiff.kernels.host.weights import Quantised, quantise


class EightBits:
    """The 8-bit weights of one model, as adapters change them. Keys are diffusers' names of weights.

    Args:
        model: a `Model`.
        merged: returns the sum of a weight and a recipe, on the weight's device and in its dtype.

    Raises:
        InputError: it is not known where the weights were loaded from.
    """

    def __init__(self, model: Any, merged: Callable[[Tensor, Recipe], Tensor]):
        self._model, self._merged = model, merged
        self._places: dict[str, tuple[str, Quantised]] = {
            key: (name, module)
            for name, module in model.named_modules()
            if isinstance(module, Quantised)
            for key in diffusers_keys(model, name)
        }
        if self._places and model.origin is None:
            raise InputError("LoRA: the files of the weights in 8 bits are not known; load the model from a folder")
        self.loaded: dict[str, Tensor] = {}  # our parameters, 8-bit values and factors, without adapters
        self._before: dict[str, Tensor] = {}  # by key: the weight before it was quantised
        self._kept: dict[str, list[tuple[torch.dtype, Recipe]]] = {}  # what became part of a weight for good, in order

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def fetch(self, keys: Iterable[str]) -> None:
        """Read weights from the model's files, if `write` needs them and does not have them yet.

        Raises InputError, and has changed nothing, if the files have gone or do not hold the weights that were loaded.
        """
        wanted = {key: self._places[key][1] for key in keys if key in self and key not in self._before}
        if not wanted:
            return
        origin: Origin = self._model.origin
        try:
            state = origin.read()
        except InputError as error:
            raise InputError(f"LoRA: the model's files are read again for weights in 8 bits: {error}") from None
        rename_old_attention_keys(state, {key: module.shape for key, module in wanted.items()})
        loaded, before = dict(self.loaded), {}
        for key, module in wanted.items():
            name = self._places[key][0]
            for part, tensor in module.named_parameters():
                loaded.setdefault(f"{name}.{part}", tensor.detach().to("cpu", copy=True))
            before[key] = self._checked(key, state.pop(key, None), origin.device, loaded)
        self.loaded, self._before = loaded, self._before | before

    def _checked(self, key: str, given: Tensor | None, device: torch.device, loaded: Mapping[str, Tensor]) -> Tensor:
        """Return a weight of the files with all that became part of it. Quantised, it must be the loaded weight."""
        values, scale = self._split(key, loaded)
        if given is not None and given.shape == values.shape:
            for dtype, recipe in self._kept.get(key, ()):
                here = given.to(self._model.device, dtype)
                given = self._merged(here, tuple((update.to(here.device), factor) for update, factor in recipe))
            again = quantise(given.to(device), values.dtype)
            same = torch.equal(again.values.cpu().view(torch.int8), values.view(torch.int8))
            if same and torch.equal(again.scale.cpu(), scale):
                return given.to("cpu", self._model.dtype, copy=True)
        raise InputError(f"LoRA: {key} in the model's files is not the weight that was loaded; load the model again")

    def _split(self, key: str, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values and the factors of a weight, as views of our parameters."""
        name = self._places[key][0]
        keys = diffusers_keys(self._model, name)
        return [split_stacked(parameters[f"{name}.{part}"], keys)[key] for part in ("values", "scale")]

    def write(self, key: str, recipe: Recipe) -> Tensor:
        """Write one weight that has been fetched, quantised as at loading. Return its factors."""
        name, module = self._places[key]
        values, scale = self._split(key, {f"{name}.{part}": each for part, each in module.named_parameters()})
        made_values, made_scale = self._split(key, self.loaded)
        if recipe:
            total = self._merged(self._before[key].to(values.device), recipe)
            again = quantise(total.to(self._model.origin.device), values.dtype)
            made_values, made_scale = again.values, again.scale
        values.copy_(made_values)
        scale.copy_(made_scale)
        return scale

    def keep(self, recipes: Mapping[str, Recipe]) -> None:
        """Make recipes that are written a part of their weights for good, and free the copies of these weights."""
        for key, recipe in recipes.items():
            on_host = tuple((update.to(torch.device("cpu")), factor) for update, factor in recipe)
            self._kept.setdefault(key, []).append((self._model.dtype, on_host))
            name = self._places[key][0]
            for each in diffusers_keys(self._model, name):
                self._before.pop(each, None)
            for part in ("values", "scale"):
                self.loaded.pop(f"{name}.{part}", None)

    def follow_dtype(self) -> list[str]:
        """Convert the weights that are kept to the model's dtype. Return the keys of those that it changes."""
        dtype = self._model.dtype
        old = {key: weight for key, weight in self._before.items() if weight.dtype != dtype}
        self._before |= {key: weight.to(dtype) for key, weight in old.items()}
        return list(old)

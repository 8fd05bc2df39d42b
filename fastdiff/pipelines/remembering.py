"""Remember the encodings of the prompts used last, so that each text is encoded once, also across calls."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.execution.tensors import count_writes
from fastdiff.models.model import Model

MOST_TEXTS = 64
MOST_BYTES = 64 * 2**20  # on the device of the encoders; 64 prompts of SDXL have 20 MB in 16 bits, and 40 MB in float32


class Encoded(NamedTuple):
    """An encoded prompt: what a denoiser reads of it."""

    text: Tensor  # (L, text_width)
    pooled: Tensor | None = None  # (width,), for SDXL

    @property
    def nbytes(self) -> int:
        """The memory of the tensors in bytes."""
        return sum(each.nbytes for each in self if each is not None)


class Remembered:
    """Encoded prompts by key. Those that were used last stay. A copy of it is empty."""

    def __init__(self) -> None:
        self.most_texts, self.most_bytes = MOST_TEXTS, MOST_BYTES
        self._entries: OrderedDict[Hashable, Encoded] = OrderedDict()
        self._device: torch.device | None = None

    def find(self, key: Hashable, device: torch.device) -> Encoded | None:
        """Return an entry, whose tensors are on `device`. Free all entries on another device."""
        if device != self._device:
            self._entries.clear()
            self._device = device
        found = self._entries.pop(key, None)
        if found is not None:
            self._entries[key] = found
        return found

    def add(self, key: Hashable, encoded: Encoded) -> None:
        """Keep an encoding, and drop the entries that were used the longest ago beyond the limits."""
        self._entries[key] = encoded
        self.shrink()

    def shrink(self) -> None:
        """Drop entries beyond the limits."""
        while len(self._entries) > self.most_texts or self.nbytes > self.most_bytes:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()

    @property
    def nbytes(self) -> int:
        """The memory of all entries in bytes."""
        return sum(each.nbytes for each in [*self._entries.values()])

    def __len__(self) -> int:
        return len(self._entries)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_entries": OrderedDict()}


class Weights:
    """Identifies what an encoder computes with, at the cost of looking at its parameters and not at their numbers.

    It sees adapters with their weights and scale, the vectors of loaded embeddings, converted dtypes, parameters that
    were replaced, and every write that torch counts: in-place operations, optimizers and `load_state_dict`. It does not
    see writes through `.data` or `.detach().numpy()`, and kernels outside of torch.
    """

    def __init__(self, model: Model):
        self._model = model
        self._places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
        self._seen: list[weakref.ref[Tensor]] = []
        self._replaced = 0  # how often other parameters took the places

    def state(self) -> Hashable | None:
        """Return an object whose equality means equal weights; None if torch does not count the writes to them."""
        there = [each for own, name in self._places if (each := own[name]) is not None]
        seen = [ref() for ref in self._seen]
        if len(there) != len(seen) or any(one is not other for one, other in zip(there, seen, strict=True)):
            self._seen = [weakref.ref(each) for each in there]
            self._replaced += 1
        model, writes = self._model, count_writes(there)
        if writes is None:
            return None
        if model.merging is not None:
            writes -= model.merging.own_writes  # `weights_state` says what they have made
        return self._replaced, writes, model.casts, model.weights_state, model.times_changed

    def __getstate__(self) -> dict[str, Any]:
        return {"_model": self._model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_model"])  # type: ignore[misc]


class Remembering:
    """The text encoders of a pipeline, which remember the prompts that were encoded last; see `remember`."""

    def __init__(self, models: Sequence[Model]):
        self._remembered, self._weights = Remembered(), [Weights(model) for model in models]

    def _once(self, told: Hashable, device: torch.device, encode: Callable[[], Encoded]) -> Encoded:
        """Return `encode()`, or what it returned before.

        Args:
            told: all that the encoding depends on, except the weights.
            device: of the encoders.
        """
        weights = tuple(each.state() for each in self._weights)
        if None in weights:
            return encode()
        key = told, weights
        encoded = self._remembered.find(key, device)
        if encoded is None:
            encoded = encode()
            self._remembered.add(key, encoded)
        return encoded

    def remember(self, most: int = MOST_TEXTS, most_bytes: int = MOST_BYTES) -> None:
        """Keep the encodings of the `most` prompts used last, in at most `most_bytes` of the encoders' device.

        By default 64 prompts and 64 MiB. `remember(0)` encodes each text in every call. A remembered encoding has the
        bits of a new one. It counts only for the same text, clip skip, prompt syntax, emphasis, adapters with weights
        and scale, loaded embeddings, dtype, device and weights of the encoders. Call `forget` after a write to the
        weights that torch does not count: through `.data`, through numpy, or by a kernel outside of torch.
        """
        self._remembered.most_texts, self._remembered.most_bytes = most, most_bytes
        self._remembered.shrink()

    def forget(self) -> None:
        """Encode each text anew when it is used next."""
        self._remembered.clear()

"""Contents of a .bin other than a dictionary of tensors by name."""

import io
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

State = dict[str, torch.Tensor]


class Code:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def _with(key: Any, make: Callable[[], Any] = lambda: torch.zeros(1)) -> Callable[[State], dict]:
    return lambda state: {**state, key: make()}


CONTENTS: dict[str, Callable[[State], Any]] = {
    "the same": dict,
    "ordered": OrderedDict,
    "parameters": lambda state: {key: torch.nn.Parameter(value) for key, value in state.items()},
    "an int for a key": _with(7),
    "None for a key": _with(None),
    "a tuple for a key": _with(("a", "b")),
    "a surrogate for a key": _with("\ud800"),
    "a long key": _with("x" * 100_000),
    "many keys": lambda state: state | {f"more.{i}": torch.zeros(0) for i in range(20_000)},
    "a number": _with("more", lambda: 7),
    "a list": list,
    "nothing": lambda state: None,
    "a checkpoint": lambda state: {"state_dict": state, "epoch": 1},
    "code": _with("more", Code),
    "sparse": lambda state: {key: value.to_sparse() for key, value in state.items()},
    "one sparse": _with("more", lambda: torch.ones(2).to_sparse()),
    "meta": lambda state: {key: value.to("meta") for key, value in state.items()},
    "quantised": _with("more", lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)),
    "nested": lambda state: {key: {key: value} for key, value in state.items()},
    "views of one": lambda state: {key: torch.zeros(1).expand(value.shape) for key, value in state.items()},
    "a giant view": _with("more", lambda: torch.zeros(1).expand(2**40)),
}
HARMLESS = ("the same", "ordered", "parameters", "views of one", "an old file")
OTHERS = ("a plain pickle", "compressed", "an old file")


def dump(how: str, state: State) -> bytes:
    """Return the bytes of a .bin; `how` is a name in CONTENTS or OTHERS."""
    buffer = io.BytesIO()
    if how == "a plain pickle":
        return pickle.dumps({"x": Code()})
    with warnings.catch_warnings():  # torch warns about quantised tensors
        warnings.simplefilter("ignore")
        torch.save(CONTENTS.get(how, dict)(state), buffer, _use_new_zipfile_serialization=how != "an old file")
    return compressed(buffer.getvalue()) if how == "compressed" else buffer.getvalue()


def compressed(content: bytes) -> bytes:
    """Add a zip bomb to the archive."""
    buffer = io.BytesIO(content)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/bomb", b"\0" * 2**24)
    return buffer.getvalue()

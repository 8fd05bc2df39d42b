"""Image prompts of accelerated U-Nets with IP-Adapters: the arguments of calls, fitting and hostile."""

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.values import OBJECTS
from tests.parity.image_prompts import adapters
from tests.support.text_pipelines import tiny_unet

KINDS = ("sd1", "sdxl")
LOADED = {"plain": ("plain",), "plus": ("plus",), "both": ("plain", "plus")}
COUNT, TEXT = 2, {"sd1": 32, "sdxl": 72}
SHAPES = {
    "plain": (COUNT, 1, adapters.ENCODER["projection_dim"]),
    "plus": (COUNT, 1, 10, adapters.ENCODER["hidden_size"]),
}
Change = Callable[[Tensor], Any]


def embeds(adapter: str) -> Tensor:
    """Return the image prompts of an adapter, for a picture each."""
    return torch.randn(SHAPES[adapter], generator=torch.Generator().manual_seed(len(adapter)))


@cache
def unet(kind: str, loaded: str) -> Any:
    """Return a tiny U-Net of diffusers with IP-Adapters."""
    model = tiny_unet(kind)
    files = [adapters.nested(adapters.ip_adapter(model, each, i)) for i, each in enumerate(LOADED[loaded])]
    model._load_ip_adapter_weights(files, low_cpu_mem_usage=False)
    return model.eval()


def sound(kind: str, loaded: str) -> dict[str, Any]:
    """Return the arguments of a call."""
    generator = torch.Generator().manual_seed(1)
    added: dict[str, Any] = {"image_embeds": [embeds(each) for each in LOADED[loaded]]}
    if kind == "sdxl":
        added |= {"text_embeds": torch.ones(COUNT, 24), "time_ids": torch.ones(COUNT, 6)}
    shapes = {"sample": (COUNT, 4, 8, 8), "encoder_hidden_states": (COUNT, 5, TEXT[kind])}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**tensors, "timestep": 7, "added_cond_kwargs": added}


def called(kind: str, loaded: str, place: str, form: str) -> dict[str, Any]:
    """Return the arguments of a call with something of `form` at `place`: see `PLACES`."""
    given = sound(kind, loaded)
    PLACES[place](given["added_cond_kwargs"], given, form)
    return given


def _first(added: dict[str, Any], given: dict[str, Any], form: str) -> None:
    added["image_embeds"][0] = FORMS[form](added["image_embeds"][0])


def _last(added: dict[str, Any], given: dict[str, Any], form: str) -> None:
    added["image_embeds"][-1] = FORMS[form](added["image_embeds"][-1])


def _list(added: dict[str, Any], given: dict[str, Any], form: str) -> None:
    added["image_embeds"] = LISTS[form](added["image_embeds"])


def _all(added: dict[str, Any], given: dict[str, Any], form: str) -> None:
    given["added_cond_kwargs"] = DICTS[form](added)


FITTING: dict[str, Change] = {
    "sound": lambda each: each,
    "several pictures": lambda each: torch.cat([each] * 3, 1),
    "strided": lambda each: torch.cat([each, each], -1)[..., : each.shape[-1]],
    "expanded": lambda each: each[:1].expand_as(each),
    "huge": lambda each: each * 1e30,
    "NaN": lambda each: each * torch.nan,
    "infinity": lambda each: each / 0,
    "negative zeros": lambda each: each * -0.0,
    "a parameter": lambda each: torch.nn.Parameter(each, requires_grad=False),
    "half": lambda each: each.half(),
    "double": lambda each: each.double(),
}
HOSTILE: dict[str, Change] = {
    "integers": lambda each: each.int(),
    "bools": lambda each: each > 0,
    "complex": lambda each: each.to(torch.complex64),
    "float8": lambda each: each.to(torch.float8_e4m3fn),
    "sparse": lambda each: each.to_sparse(),
    "meta": lambda each: each.to("meta"),
    "requires grad": lambda each: each.requires_grad_(),
    "giant": lambda each: each[:1, :1].expand(2**20, 2**20, *each.shape[2:]),
    "a number": lambda each: torch.tensor(1.0),
    "no pictures": lambda each: each[:, :0],
    "no rows": lambda each: each[:0],
    "one row": lambda each: each[:1],
    "three rows": lambda each: torch.cat([each, each[:1]]),
    "without an axis": lambda each: each[0],
    "an axis more": lambda each: each[None],
    "flat": lambda each: each.flatten(),
    "narrow": lambda each: each[..., :-1],
    "wide": lambda each: torch.cat([each, each], -1),
    "array": lambda each: each.numpy(),
    "a list": lambda each: each.tolist(),
    "a list of it": lambda each: [each],
    **{name: lambda each, name=name: OBJECTS[name]() for name in ("None", "x", "1.9", "[]", "dict", "object", "class")},
}
FORMS = FITTING | HOSTILE
LISTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "a tuple": tuple,
    "one more": lambda each: [*each, each[0]],
    "one less": lambda each: each[1:],
    "reversed": lambda each: each[::-1],
    "the first": lambda each: each[0],
    "the first without its axis": lambda each: each[0][:, 0],
    "nested": lambda each: [each],
    "by name": lambda each: dict(enumerate(each)),
    "a generator": lambda each: (one for one in each),
    "an array": lambda each: np.array([None] * len(each), dtype=object),
    "long": lambda each: each * 100_000,
    "itself": lambda each: each.append(each) or each,
    **{name: lambda each, name=name: OBJECTS[name]() for name in ("None", "x", "0", "{}", "set", "endless", "0-d")},
}
DICTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "without": lambda added: {key: each for key, each in added.items() if key != "image_embeds"},
    "nothing else": lambda added: {"image_embeds": added["image_embeds"]},
    "a number beside": lambda added: added | {1: 2},
    "a hint beside": lambda added: added | {"hint": torch.zeros(COUNT, 3, 16, 16)},
    "a text beside": lambda added: added | {"text_embeds": torch.zeros(COUNT, 24)},
    "control characters": lambda added: added | {"\x1b[31m\n": 1},
    "pairs": lambda added: [*added.items()],
    "a view": types.MappingProxyType,
    **{name: lambda added, name=name: OBJECTS[name]() for name in ("None", "{}", "[]", "x", "1", "set", "endless")},
}
PLACES: dict[str, Callable[[dict[str, Any], dict[str, Any], str], None]] = {
    "first": _first,
    "last": _last,
    "list": _list,
    "all": _all,
}
SOUND = {"kind": "sd1", "loaded": "plain", "place": "first", "form": "sound"}
VALUES = {"first": FORMS, "last": FORMS, "list": LISTS, "all": DICTS}


def must_be_refused(place: str, form: str) -> bool:
    """Return whether the call must fail."""
    return place in ("first", "last") and form in HOSTILE


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Return the edits, the door, what to call, and the options of a case."""
    kind, loaded = draw(st.sampled_from(KINDS)), draw(st.sampled_from([*LOADED]))
    place = draw(st.sampled_from(["first", *PLACES]))
    form = draw(st.sampled_from([*VALUES[place]]))
    return (), "library", "image prompt", (("kind", kind), ("loaded", loaded), ("place", place), ("form", form))

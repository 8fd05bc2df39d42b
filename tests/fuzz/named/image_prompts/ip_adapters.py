"""IP-Adapter files and image encoders, sound and hostile, next to a model's files."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from tests.parity.image_prompts import adapters
from tests.support.text_pipelines import tiny_unet

NAME = "picture.safetensors"
ENCODER = "image_encoder"
State = dict[str, Tensor]


def ip_adapter(folder: Path, form: str, place: str) -> None:
    """Write an IP-Adapter. `place`, in 1/1000 of its keys or bytes, chooses what is changed."""
    (folder / NAME).write_bytes(FORMS[form](int(place)))


def image_encoder(folder: Path, form: str) -> None:
    """Write an image encoder where an IP-Adapter looks for it."""
    encoder = adapters.image_encoder(**({"projection_dim": 40} if form == "wide" else {}))
    state, config = (
        dict(encoder.state_dict()),
        encoder.config.to_diff_dict() | {"architectures": [type(encoder).__name__]},
    )
    (folder / ENCODER).mkdir()
    (folder / ENCODER / "config.json").write_text(json.dumps(config | ENCODERS[form][0]))
    key = "visual_projection.weight"
    state[key] = ENCODERS[form][1](state[key])
    (folder / ENCODER / "model.safetensors").write_bytes(save({name: each for name, each in state.items()}))


def embeds(path: Path) -> list[Tensor]:
    """Return image prompts for a guided call, of the shape that a sound file reads."""
    if b"latents" in path.read_bytes():
        return [torch.ones(2, 1, 3, adapters.ENCODER["hidden_size"])]
    return [torch.ones(2, 1, adapters.ENCODER["projection_dim"])]


@cache
def _sound(kind: str = "plain", model: str = "sd1") -> State:
    return adapters.ip_adapter(tiny_unet(model), kind)


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[int], bytes]:
    return lambda place: save({key: change(each).contiguous() for key, each in _sound().items()})


def _one(change: Callable[[State, str], Any], kind: str = "plain") -> Callable[[int], bytes]:
    """Return a maker of the sound file with a change of its tensors, or of the one at `place`."""

    def made(place: int) -> bytes:
        state = dict(_sound(kind))
        change(state, list(state)[place * (len(state) - 1) // 1000])
        return save({key: each.contiguous().clone() for key, each in state.items()})

    return made


def _replaced(change: Callable[[Tensor], Tensor], kind: str = "plain") -> Callable[[int], bytes]:
    return _one(lambda state, key: state.update({key: change(state[key])}), kind)


def _added(key: str, value: Tensor) -> Callable[[int], bytes]:
    return _one(lambda state, _: state.update({key: value}))


def _truncated(place: int) -> bytes:
    content = save(_sound())
    return content[: place * (len(content) - 1) // 1000]


SOUND: dict[str, Callable[[int], bytes]] = {
    "plain": lambda place: save(_sound()),
    "plus": lambda place: save(_sound("plus")),
    "half": _each(lambda each: each.half()),
    "double": _each(lambda each: each.double()),
    "other keys beside": _added("other", torch.ones(2)),
}
ODD: dict[str, Callable[[int], bytes]] = {
    "large": _replaced(lambda each: each * 1e30),
    "float8": _each(lambda each: each.to(torch.float8_e4m3fn)),
}
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "NaN": _replaced(lambda each: torch.full_like(each, torch.nan)),
    "infinity": _replaced(lambda each: torch.full_like(each, -torch.inf), "plus"),
    "integers": _replaced(lambda each: each.int()),
    "complex": _replaced(lambda each: each.to(torch.complex64)),
    "flat": _replaced(lambda each: each.flatten()[None], "plus"),
    "a number": _replaced(lambda each: each.flatten()[0]),
    "nothing in it": _replaced(lambda each: each[:0], "plus"),
    "more rows": _replaced(lambda each: torch.cat([each, each])),
    "missing": _one(lambda state, key: state.pop(key)),
    "missing of plus": _one(lambda state, key: state.pop(key), "plus"),
    "layers beyond": _added("image_proj.layers.999999999999999999999.0.to_q.weight", torch.ones(64, 2)),
    "attentions beyond": _added("ip_adapter.999999999999999999999.to_k_ip.weight", torch.ones(2, 2)),
    "plain and plus": _added("image_proj.latents", torch.ones(1, 5, 128)),
    "control characters": _added("ip_adapter.\x1b[31m\n\r", torch.zeros(2, 2)),
    "another model's": lambda place: save(_sound("plain", "sdxl")),
    "FaceID": _added("ip_adapter.0.to_q_lora.down.weight", torch.ones(2, 2)),
    "Full": lambda place: save(
        {"image_proj.proj.3.weight": torch.ones(2), "ip_adapter.1.to_k_ip.weight": torch.ones(2)}
    ),
    "a LoRA": lambda place: save({"unet.conv_in.lora_A.weight": torch.ones(2, 2)}),
    "no tensors": lambda place: save({}),
    "an empty file": lambda place: b"",
    "truncated": _truncated,
    "a pickle": lambda place: b"\x80\x02cos\nsystem\n.",
}
FORMS = {**SOUND, **ODD, **HOSTILE}
ENCODERS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {  # options of the config, and a weight
    "sound": ({}, lambda each: each),
    "half": ({}, lambda each: each.half()),
    "wide": ({}, lambda each: each),
    "NaN": ({}, lambda each: torch.full_like(each, torch.nan)),
    "infinite results": ({}, lambda each: each * 1e38),
    "flat": ({}, lambda each: each.flatten()),
    "another size": ({"image_size": 40}, lambda each: each),
    "large pictures": ({"image_size": 10**6}, lambda each: each),
    "no channels": ({"num_channels": 0}, lambda each: each),
    "a text encoder": ({"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"}, lambda each: each),
}
REFUSED_ENCODERS = ("wide", "NaN", "infinite results", "flat", "another size", "large pictures", "no channels")


def must_be_refused(form: str, place: str) -> bool:
    """Return whether drawing with the file must fail."""
    return form in HOSTILE


@st.composite
def loaded(draw: st.DrawFn, headers: Sequence[str]) -> tuple[Any, ...]:
    """Return the edits, the door, what to call, and the flags of a case, as `loras.loaded`."""
    place = draw(st.integers(0, 1000).map(str))
    if draw(st.integers(0, 2)) == 2:
        return _on_the_page(draw(st.sampled_from([*SOUND, *FORMS])), place, draw(st.sampled_from([*ENCODERS, "sound"])))
    edits: list[tuple[str, ...]] = [("ip_adapter", draw(st.sampled_from([*SOUND, *FORMS])), place)]
    if draw(st.integers(0, 3)) == 3:
        damage = [st.tuples(st.just("flip"), st.just(NAME), st.just(place), st.integers(0, 7).map(str))]
        damage += [st.tuples(st.just("header"), st.just(NAME), st.sampled_from(headers))]
        edits.append(draw(st.one_of(damage)))
    return tuple(edits), "library", "adapters", ()


def _on_the_page(form: str, place: str, encoder: str) -> tuple[Any, ...]:
    """Return the edits, the door and so on of a drawing with an IP-Adapter that the page offers."""
    beside = [] if encoder == "sound" else [("image_encoder", encoder)]
    adapter = [("ip_adapter", form, place)] if form != "plain" or not beside else []
    return (*adapter, *beside), "page", "image prompt", ()

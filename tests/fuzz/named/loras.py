"""LoRA files, sound and hostile, next to a model's files."""

import json
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from tests.adapters import formats
from tests.fuzz.named import embeddings
from tests.parity.z_image import loras as z_image
from tests.parity.z_image import tiny
from tests.support.text_pipelines import text_pipeline

NAME = "style.safetensors"
State = dict[str, Tensor]
METADATA = "lora_adapter_metadata"


def lora(folder: Path, form: str, place: str) -> None:
    """Write a LoRA. `place`, in 1/1000 of its keys or bytes, chooses what is changed."""
    (folder / NAME).write_bytes(FORMS[form](int(place)))


@cache
def _loras() -> formats.Loras:
    return formats.random_loras(text_pipeline("sd1"), rank=2)


@cache
def _sound() -> State:
    return {key: each.contiguous() for key, each in formats.in_diffusers(_loras()).items()}


def _in(make: Callable[[formats.Loras], State]) -> Callable[[int], bytes]:
    return lambda place: save({key: each.contiguous().clone() for key, each in make(_loras()).items()})


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[int], bytes]:
    """Return a maker of the sound file with every tensor changed."""
    return lambda place: save({key: change(each).contiguous() for key, each in _sound().items()})


def _one(change: Callable[[State, str], Any]) -> Callable[[int], bytes]:
    """Return a maker of the sound file with a change of its tensors, or of the one at `place`."""

    def made(place: int) -> bytes:
        state = dict(_sound())
        change(state, list(state)[place * (len(state) - 1) // 1000])
        return save({key: each.contiguous().clone() for key, each in state.items()})

    return made


def _replaced(change: Callable[[Tensor], Tensor]) -> Callable[[int], bytes]:
    return _one(lambda state, key: state.update({key: change(state[key])}))


def _added(key: str, value: Tensor) -> Callable[[int], bytes]:
    return _one(lambda state, _: state.update({key: value}))


def _beside(end: str, value: Tensor) -> Callable[[int], bytes]:
    """Return a maker of the sound file with one more tensor of the layer at `place`."""
    return _one(lambda state, key: state.update({f"{key.rpartition('.lora_')[0]}.{end}": value}))


def _said(text: str) -> Callable[[int], bytes]:
    """Return a maker of the sound file with this text as diffusers' metadata."""
    return lambda place: save(_sound(), {METADATA: text})


def _header(change: Callable[[dict[str, Any], str], Any]) -> Callable[[int], bytes]:
    """Return a maker of the sound file with a change of its header, which no library would write."""

    def made(place: int) -> bytes:
        content = save(_sound())
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        change(entries, list(entries)[place * (len(entries) - 1) // 1000])
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return made


def _truncated(place: int) -> bytes:
    content = save(_sound())
    return content[: place * (len(content) - 1) // 1000]


_KOHYA = "lora_unet_mid_block_attentions_0_proj_in"
_CHECKPOINT = {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(4, 4, 3, 3)}
SOUND: dict[str, Callable[[int], bytes]] = {
    "diffusers": lambda place: save(_sound()),
    "old diffusers": _in(formats.in_old_diffusers),
    "kohya": _in(lambda loras: formats.in_kohya(loras, 1.0)),
    "LDM's names": _in(formats.in_ldm),
    "half": _each(lambda each: each.half()),
    "bfloat16": _each(lambda each: each.bfloat16()),
    "double": _each(lambda each: each.double()),
    "metadata": _said(json.dumps({"unet.lora_alpha": 4, "unet.r": 2})),
}
ODD: dict[str, Callable[[int], bytes]] = {  # some of these are read, whatever they say
    "float8": _each(lambda each: each.to(torch.float8_e4m3fn)),
    "one double": _replaced(lambda each: each.double()),
    "large": _replaced(lambda each: each * 1e30),
    "alpha of 10^38": _beside("alpha", torch.tensor(1e38)),
    "alpha of 0": _beside("alpha", torch.tensor(0.0)),
    "metadata of another shape": _header(lambda entries, key: entries.update(__metadata__=[1])),
    "odd metadata": _header(lambda entries, key: entries.update(__metadata__={METADATA: {"a": 1}, "b": None})),
    "a list as metadata": _said("[1]"),
    "patterns that are none": _said('{"unet.alpha_pattern": [1], "unet.lora_alpha": 4}'),
    "an expression that is none": _said('{"unet.alpha_pattern": {"(": 1, "(a+)+$": 2}, "unet.lora_alpha": 4}'),
    "a config that is none": _said('{"": 1, "unet": [], "unet.": {}}'),
}
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "NaN": _replaced(lambda each: torch.full_like(each, torch.nan)),
    "infinity": _replaced(lambda each: torch.full_like(each, -torch.inf)),
    "NaN in float8": _each(lambda each: torch.full_like(each, torch.nan).to(torch.float8_e4m3fn)),
    "integers": _replaced(lambda each: each.int()),
    "bools": _replaced(lambda each: each.bool()),
    "complex": _replaced(lambda each: each.to(torch.complex64)),
    "other rank": _replaced(lambda each: torch.cat([each, each])),
    "no rank": _replaced(lambda each: each[:0]),
    "flat": _replaced(lambda each: each.flatten()),
    "a number": _replaced(lambda each: each.flatten()[0]),
    "down or up alone": _one(lambda state, key: state.pop(key)),
    "two namings": _added(f"{_KOHYA}.lora_down.weight", torch.zeros(2, 8)),
    "10^5 keys": _one(
        lambda state, key: state.update({f"lora_unet_x{i}.alpha": torch.zeros(()) for i in range(10**5)})
    ),
    "unknown layer": _added("lora_unet_x.lora_down.weight", torch.zeros(2, 2)),
    "control characters": _added("unet.\x1b[31m\n\r.lora_A.weight", torch.zeros(2, 2)),
    "a checkpoint": lambda place: save(_CHECKPOINT),
    "a checkpoint beside": _added(next(iter(_CHECKPOINT)), torch.zeros(4, 4, 3, 3)),
    "an embedding": lambda place: save({"emb_params": torch.zeros(1, embeddings.WIDTH)}),
    "no tensors": lambda place: save({}),
    "an empty file": lambda place: b"",
    "truncated": _truncated,
    "alpha of NaN": _beside("alpha", torch.tensor(torch.nan)),
    "alpha of two numbers": _beside("alpha", torch.zeros(2)),
    "alpha of no number": _beside("alpha", torch.zeros(0)),
    "complex alpha": _beside("alpha", torch.tensor(1j)),
    "kohya's DoRA": _beside("dora_scale", torch.ones(8)),
    "a difference": _beside("diff", torch.ones(8)),
    "magnitudes of another size": _beside("lora_magnitude_vector", torch.ones(3)),
    "LoHa beside": _beside("hada_w1_a", torch.ones(2, 2)),
    "no JSON as metadata": _said("{"),
    "deep metadata": _said("[" * 10**5),
    "alpha of a text": _said('{"unet.lora_alpha": "4"}'),
    "alpha that is infinite": _said('{"unet.lora_alpha": Infinity}'),
    "rank of 10^6": _header(lambda entries, key: entries[key].update(shape=[10**6, 10**6])),
    "negative shape": _header(lambda entries, key: entries[key].update(shape=[-1, 2])),
    "offsets beyond": _header(lambda entries, key: entries[key].update(data_offsets=[2**60, 2**61])),
    "unknown dtype": _header(lambda entries, key: entries[key].update(dtype="Q7")),
    "a dtype that is a list": _header(lambda entries, key: entries[key].update(dtype=[1])),
    "2^63 of header": lambda place: struct.pack("<Q", 2**63) + b"{" + b" " * 64,
    "a pickle": lambda place: b"\x80\x02cos\nsystem\n.",
}
FORMS = {**SOUND, **ODD, **HOSTILE}


@cache
def _captions() -> z_image.Loras:
    return z_image.sharing_down(z_image.random_loras(tiny.pipeline(lambda model: None).transformer, rank=2))


OF_CAPTIONS: dict[str, Callable[[], State]] = {  # LoRAs of Z-Image
    "diffusers": lambda: z_image.in_peft(_captions()),
    "kohya": lambda: z_image.in_kohya(_captions()),
    "qkv": lambda: z_image.in_kohya(z_image.stacked(_captions())),
    "both names": lambda: z_image.written_twice(_captions()),
    "LoKr": lambda: z_image.in_lokr(tiny.pipeline(lambda model: None).transformer),
}
DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda each: each,
    "NaN": lambda each: torch.full_like(each, torch.nan),
    "integers": lambda each: each.int(),
    "other rows": lambda each: torch.cat([each.reshape(len(each) if each.ndim else 1, -1)] * 2),
    "no rows": lambda each: each.reshape(-1)[:0],
    "a number": lambda each: each.flatten()[0],
    "flat": lambda each: each.flatten(),
}


def caption_lora(folder: Path, form: str, damage: str, place: str) -> None:
    """Write a LoRA of Z-Image. `place`, in 1/1000 of its keys, chooses the tensor that is damaged."""
    state = OF_CAPTIONS[form]()
    key = list(state)[int(place) * (len(state) - 1) // 1000]
    state[key] = DAMAGES[damage](state[key])
    (folder / NAME).write_bytes(save({key: each.contiguous().clone() for key, each in state.items()}))


@st.composite
def of_captions(draw: st.DrawFn) -> tuple[Any, ...]:
    """Return the edit and the flags of a LoRA of Z-Image, or of Stable Diffusion."""
    place = draw(st.integers(0, 1000).map(str))
    forms, damages = st.sampled_from([*OF_CAPTIONS]), st.sampled_from(["none", *DAMAGES])
    edit = st.tuples(st.just("caption_lora"), forms, damages, st.just(place))
    edit |= st.tuples(st.just("lora"), st.sampled_from([*FORMS]), st.just(place))
    return (draw(edit),), (("--lora", f"../model/{NAME}{draw(st.sampled_from(WEIGHTS))}"),)


WEIGHTS = ("", "", ":0.5", ":-1", ":0", ":1e30", ":1e300", ":nan", ":x", ":", ":\N{SNOWMAN}")


def must_be_refused(form: str, place: str) -> bool:
    """Return whether drawing with the file must fail."""
    return form in HOSTILE


@st.composite
def loaded(draw: st.DrawFn, headers: Sequence[str]) -> tuple[Any, ...]:
    """Return the edits, the door, what to call, and the flags of a case.

    headers: the ways to damage the header of a file.
    """
    place = draw(st.integers(0, 1000).map(str))
    edits: list[tuple[str, ...]] = [("lora", draw(st.sampled_from([*SOUND, *FORMS])), place)]
    if draw(st.integers(0, 3)) == 3:
        edits.append(
            draw(
                st.one_of(
                    st.tuples(st.just("flip"), st.just(NAME), st.just(place), st.integers(0, 7).map(str)),
                    st.tuples(st.just("truncate"), st.just(NAME), st.just(place)),
                    st.tuples(st.just("header"), st.just(NAME), st.sampled_from(headers)),
                )
            )
        )
    what = draw(st.sampled_from(["sample", "adapters", "adapters", "info lora", "list loras"]))
    if what == "adapters":
        if draw(st.booleans()):
            edits.append(draw(embeddings.written()))
        return tuple(edits), "library", what, ()
    flags = (("--lora", f"../model/{NAME}{draw(st.sampled_from(WEIGHTS))}"),) if what == "sample" else ()
    return tuple(edits), "command", what, flags

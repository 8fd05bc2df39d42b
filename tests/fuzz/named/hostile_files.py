"""Hostile single files: edits that write model.safetensors beside the parts of a folder, whose configs it needs."""

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from tests.checkpoints.single_files import ldm
from tests.support.text_pipelines import text_pipeline

FILE_NAME = "model.safetensors"
UNET = "model.diffusion_model."
REFINER = "conditioner.embedders.0.model.transformer.resblocks.0.ln_1.weight"
State = dict[str, torch.Tensor]


def single(folder: Path, how: str, place: str = "0") -> None:
    """Write a file. `place`, in 1/1000 of its keys or bytes, chooses what is changed."""
    (folder / FILE_NAME).write_bytes(CONTENTS[how](int(place)))


@cache
def _sound() -> State:
    state = ldm.whole("sd1", text_pipeline("sd1"))
    return {key: tensor.detach().clone().contiguous() for key, tensor in state.items()}


def _with(change: Callable[[State, str], Any]) -> Callable[[int], bytes]:
    """Return a maker of the sound file with a change of its tensors, or of one of them."""

    def made(place: int) -> bytes:
        state = dict(_sound())
        change(state, list(state)[place * (len(state) - 1) // 1000])
        return save(state)

    return made


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


def _more(prefix: str, count: int, size: int = 1) -> Callable[[State, str], None]:
    return lambda state, key: state.update({f"{prefix}{i}": torch.zeros(size) for i in range(count)})


CONTENTS: dict[str, Callable[[int], bytes]] = {
    "sound": lambda place: save(_sound()),
    "many keys": _with(_more(f"{UNET}more.", 20_000, 0)),
    "only many keys": lambda place: save({f"k{i}": torch.zeros(0) for i in range(100_000)}),
    "no shape": _with(lambda state, key: state.update({key: torch.zeros(())})),
    "wrong shape": _with(lambda state, key: state.update({key: torch.zeros(3, 1, 2)})),
    "a tensor less": _with(lambda state, key: state.pop(key)),
    "two models": _with(_more("joint_blocks.0.", 3)),
    "two U-Nets": _with(lambda state, key: state.update({"input_blocks.0.0.weight": torch.zeros(4, 4, 3, 3)})),
    "NaN": _with(lambda state, key: state.update({key: torch.full_like(state[key].float(), torch.nan)})),
    "for inpainting": _with(
        lambda state, key: state.update({f"{UNET}input_blocks.0.0.weight": torch.zeros(16, 9, 3, 3)})
    ),
    "a refiner's encoder": _with(lambda state, key: state.update({REFINER: torch.zeros(8)})),
    "a LoRA": lambda place: save({"lora_unet_mid_block.lora_up.weight": torch.zeros(2, 2)}),
    "paths": _with(lambda state, key: state.update({f"{UNET}../../../etc/{place}": torch.zeros(1) for place in "ab"})),
    "only paths": lambda place: save({"../../beside/w": torch.zeros(1), "/etc/passwd": torch.zeros(1)}),
    "control characters": _with(lambda state, key: state.update({f"{UNET}\x1b[31m\n\r": torch.zeros(1)})),
    "truncated": _truncated,
    "100 MB of header": lambda place: struct.pack("<Q", 100 * 2**20) + b"{" + b" " * 64,
    "2^63 of header": lambda place: struct.pack("<Q", 2**63) + b"{" + b" " * 64,
    "negative shape": _header(lambda entries, key: entries[key].update(shape=[-1, 2])),
    "giant shape": _header(lambda entries, key: entries[key].update(shape=[2**62, 2**62])),
    "offsets beyond": _header(lambda entries, key: entries[key].update(data_offsets=[2**60, 2**61])),
    "unknown dtype": _header(lambda entries, key: entries[key].update(dtype="Q7")),
    "a dtype that is a list": _header(lambda entries, key: entries[key].update(dtype=[1])),
    "metadata that is a list": _header(lambda entries, key: entries.update(__metadata__=[1])),
    "a pickle": lambda place: b"\x80\x02cos\nsystem\n.",
}
# Files whose every `place` must be refused
REFUSED = ("many keys", "only many keys", "no shape", "two models", "two U-Nets", "a LoRA", "paths", "only paths")
REFUSED += ("for inpainting", "a refiner's encoder")
REFUSED += ("control characters", "truncated", "100 MB of header", "2^63 of header", "unknown dtype", "a pickle")


@st.composite
def loaded(draw: st.DrawFn) -> tuple[Any, ...]:
    """Return the edits, the door and what to call, of a case of a single file. Most are hostile."""
    edit = "single", draw(st.sampled_from(["sound", *CONTENTS])), str(draw(st.integers(0, 1000)))
    return (edit,), "command", draw(st.sampled_from(["sample file", "sample file", "info file"]))

"""ControlNets, sound and hostile, next to a model's files, and the arguments of calls with them."""

import io
import json
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

import fastdiff
from tests.checkpoints.single_files import ldm
from tests.fuzz.values import JSON, OBJECTS, PLAIN
from tests.support.text_pipelines import tiny_controlnet

NAME = "controls"
FILES = (f"{NAME}/config.json", f"{NAME}/diffusion_pytorch_model.safetensors")
ARGUMENTS = ("control_image", "image", "controlnet_conditioning_scale", "guess_mode", "controlnet")
ARGUMENTS += ("control_guidance_start", "control_guidance_end")
FILE = f"{NAME}.pth"  # a single file; its content tells whether it is a pickle
HINT = "control_model.input_hint_block.0.weight"
Saved = tuple[dict[str, Any], dict[str, Tensor]]  # a config and weights


def controlnet(folder: Path, form: str) -> None:
    """Write the folder of a ControlNet."""
    config, state = FORMS[form](_sound())
    (folder / NAME).mkdir()
    (folder / FILES[0]).write_text(json.dumps(config))
    (folder / FILES[1]).write_bytes(save(state))


def _saved(**options: Any) -> Saved:
    net = tiny_controlnet("sd1", **options)
    config = {name: value for name, value in net.config.items() if name[0] != "_"}
    return {"_class_name": "ControlNetModel", **config}, dict(net.state_dict())


@cache
def _sound() -> Saved:
    return _saved()


def _with(change: Callable[[Tensor], Tensor]) -> Callable[[Saved], Saved]:
    """Return a maker of the sound folder with its first zero convolution changed."""
    key = "controlnet_down_blocks.0.weight"
    return lambda saved: (saved[0], saved[1] | {key: change(saved[1][key])})


def _said(**options: Any) -> Callable[[Saved], Saved]:
    """Return a maker of the sound folder with these options in its config."""
    return lambda saved: (saved[0] | options, saved[1])


FORMS: dict[str, Callable[[Saved], Saved]] = {
    "sound": lambda saved: saved,
    "half": lambda saved: (saved[0], {key: each.half() for key, each in saved[1].items()}),
    "pooled": _said(global_pool_conditions=True),
    "bgr": _said(controlnet_conditioning_channel_order="bgr"),
    "large": _with(lambda weight: weight * 1e30),
    "NaN": _with(lambda weight: torch.full_like(weight, torch.nan)),
    "flat": _with(lambda weight: weight.flatten()),
    "integers": _with(lambda weight: weight.int()),
    "missing": lambda saved: (saved[0], dict(list(saved[1].items())[1:])),
    "another text": lambda saved: _saved(cross_attention_dim=48),
    "another size": lambda saved: _saved(conditioning_embedding_out_channels=(6, 6, 10)),
    "labels": lambda saved: _saved(num_class_embeds=3),
    "union": _said(_class_name="ControlNetUnionModel"),
    "a U-Net": _said(_class_name="UNet2DConditionModel"),
}
REFUSED = tuple(FORMS)[list(FORMS).index("NaN") :]


def must_be_refused(form: str) -> bool:
    """Return whether drawing with the ControlNet must fail."""
    return form in REFUSED


def control_file(folder: Path, form: str) -> None:
    """Write a ControlNet as a single file. The folder of a sound one has its config."""
    (folder / FILE).write_bytes(CONTENTS[form]())


def file_must_be_refused(form: str) -> bool:
    """Return whether drawing with the ControlNet of a single file must fail."""
    return form in REFUSED_FILES


def given(folder: Path) -> Any:
    """Return the ControlNet beside a model: a single file's, or a folder."""
    if (folder / FILE).exists():
        return fastdiff.ControlNetModel.from_single_file(folder / FILE, config=folder / NAME)
    return folder / NAME


@cache
def _by_the_authors_names() -> dict[str, Tensor]:
    state = ldm.prefixed("control_model.", ldm.ldm_controlnet(tiny_controlnet("sd1")))
    return {key: tensor.detach().clone() for key, tensor in state.items()}


def _file(**changes: Any) -> Callable[[], bytes]:
    """Return a maker of the sound safetensors file with changed tensors; None leaves one out."""
    return lambda: save(
        {key: each for key, each in (_by_the_authors_names() | changes).items() if isinstance(each, Tensor)}
    )


def _pickled(made: Callable[[dict[str, Tensor]], Any]) -> Callable[[], bytes]:
    def content() -> bytes:
        file = io.BytesIO()
        torch.save(made(_by_the_authors_names()), file)
        return file.getvalue()

    return content


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


CONTENTS: dict[str, Callable[[], bytes]] = {
    "sound": _file(),
    "bare": lambda: save({key.removeprefix("control_model."): each for key, each in _by_the_authors_names().items()}),
    "names of diffusers": lambda: save(_sound()[1]),
    "beside a U-Net": _file(**{"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(8, 4, 3, 3)}),
    "pickle": _pickled(dict),
    "of training": _pickled(lambda state: {"state_dict": state | {"steps": 3}, "epoch": 4}),
    "missing": _file(**{"control_model.zero_convs.0.0.bias": None}),
    "no hint": _file(**{HINT: None}),
    "scalar": _file(**{HINT: torch.zeros(())}),
    "NaN": _file(**{HINT: torch.full((6, 3, 3, 3), torch.nan)}),
    "far places": _file(**{f"control_model.{stem}999.0.weight": torch.zeros(1) for stem in ("zero_convs.", "input_")}),
    "a far hint": _file(**{"control_model.input_hint_block.999.weight": torch.zeros(1)}),
    "a long place": _file(**{f"control_model.input_hint_block.{'9' * 5000}.weight": torch.zeros(1)}),
    "control characters": _file(**{"control_model.\x1b[31m\n\r": torch.zeros(1)}),
    "union": _file(task_embedding=torch.zeros(2, 2)),
    "a U-Net": lambda: save({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(8, 4, 3, 3)}),
    "a LoRA": lambda: save({"lora_unet_mid_block.lora_up.weight": torch.zeros(2, 2)}),
    "empty": lambda: save({}),
    "cut": lambda: save(_by_the_authors_names())[:-9],
    "a pickle of code": lambda: pickle.dumps(_Code()),
    "a pickle of a list": _pickled(list),
    "a pickle without tensors": _pickled(lambda state: {"state_dict": {"a": 1}}),
    "a pickle that holds itself": _pickled(lambda state: _endless()),
    "a cut pickle": lambda: _pickled(dict)()[:999],
}
REFUSED_FILES = tuple(CONTENTS)[list(CONTENTS).index("missing") :]


def _endless() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["state_dict"] = found
    return found


@st.composite
def loaded(draw: st.DrawFn, headers: Sequence[str]) -> tuple[Any, ...]:
    """Return the edits, the door, what to call, and the arguments of a case.

    headers: the ways to damage the header of a file.
    """
    sound = [form for form in FORMS if form not in REFUSED]
    edits: list[tuple[str, ...]] = [("controlnet", draw(st.sampled_from([*sound, *sound, *FORMS])))]
    if draw(st.integers(0, 3)) == 3:
        edits = [("controlnet", "sound"), ("control_file", draw(st.sampled_from(["sound", "pickle", *CONTENTS])))]
    place, value = st.integers(0, 1000).map(str), st.sampled_from(PLAIN) | st.sampled_from(sorted(JSON))
    damage = st.one_of(
        st.tuples(st.just("flip"), st.sampled_from(FILES), place, st.integers(0, 7).map(str)),
        st.tuples(st.just("truncate"), st.sampled_from(FILES), place),
        st.tuples(st.just("header"), st.just(FILES[1]), st.sampled_from(headers)),
        *[st.tuples(st.just("option"), st.just(FILES[0]), st.sampled_from(sorted(_sound()[0])), value)] * 3,
    )
    edits += draw(st.lists(damage, max_size=1)) if draw(st.integers(0, 2)) == 2 else []
    wrong = draw(st.lists(st.sampled_from(ARGUMENTS), max_size=2, unique=True)) if draw(st.booleans()) else []
    return tuple(edits), "library", "control", tuple((name, draw(st.sampled_from(sorted(OBJECTS)))) for name in wrong)

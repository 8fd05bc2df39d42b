"""ControlNets, sound and hostile, next to a model's files, and the arguments of calls with them."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from tests.fuzz.values import JSON, OBJECTS, PLAIN
from tests.support.text_pipelines import tiny_controlnet

NAME = "controls"
FILES = (f"{NAME}/config.json", f"{NAME}/diffusion_pytorch_model.safetensors")
ARGUMENTS = ("control_image", "image", "controlnet_conditioning_scale", "guess_mode", "controlnet")
ARGUMENTS += ("control_guidance_start", "control_guidance_end")
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


@st.composite
def loaded(draw: st.DrawFn, headers: Sequence[str]) -> tuple[Any, ...]:
    """Return the edits, the door, what to call, and the arguments of a case.

    headers: the ways to damage the header of a file.
    """
    sound = [form for form in FORMS if form not in REFUSED]
    edits: list[tuple[str, ...]] = [("controlnet", draw(st.sampled_from([*sound, *sound, *FORMS])))]
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

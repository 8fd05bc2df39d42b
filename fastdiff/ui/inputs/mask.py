"""Masks that users paint over the start picture: white is painted anew."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.pipelines.pil_images import as_rgb
from fastdiff.requests import png
from fastdiff.requests.input_picture import InputPicture
from fastdiff.ui.inputs.uploaded import keep, without_folder
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.parts.upload import uploaded_path

MASK = "mask"  # its name inside a PNG
_NAME = "mask-name"
SIDE = 512  # pixels of the longer side, at least: a small picture is hard to paint on
MOST = 1024  # at most


def build_editor() -> gr.ImageEditor:
    """Return the editor, which is hidden. It has no `change` event, so that strokes travel only with a run."""
    editor = gr.ImageEditor(
        label="Mask: what you paint white is painted anew",
        type="filepath",
        format="png",
        sources=(),
        transforms=(),
        layers=False,
        brush=gr.Brush(colors=["#ffffff"], default_color="#ffffff", color_mode="fixed"),
        buttons=[],
        visible=False,
        elem_id="mask",
    )
    editor.accept_blobs = None  # it keeps what anyone sends in memory, and the page needs no blobs
    return editor


def editor_value(start: Path, mask: Path | None, limits: Limits) -> dict[str, Any]:
    """Return the value of the editor: the start picture, and over it the mask, if there is one.

    Raises InputError for a file that is no picture, and if the space for uploads is full.
    """
    with without_folder(start):
        picture = as_rgb(InputPicture.read(str(start)).open())
    factor = min(max(1.0, SIDE / max(picture.size)), MOST / max(picture.size))
    size = tuple(max(1, round(factor * side)) for side in picture.size)
    background = picture.resize(size)  # type: ignore[arg-type]  # two sides
    if mask is None:
        shown = _kept(background, "background.png", limits)
        return {"background": shown, "layers": [], "composite": shown}
    with without_folder(mask):
        data = mask.read_bytes()
        white = as_rgb(InputPicture.read(str(mask), MASK).open()).convert("L").resize(size)  # type: ignore[arg-type]
    layer = Image.new("RGBA", background.size, "white")
    layer.putalpha(white)
    composite = Image.alpha_composite(background.convert("RGBA"), layer)
    # the mask itself travels in the layer, so that a run without new strokes has the same mask
    original = keep(png.encode(layer, None, {MASK: data, _NAME: mask.name.encode()}), mask.name, limits)
    return {
        "background": _kept(background, "background.png", limits),
        "layers": [str(original)],
        "composite": _kept(composite, "composite.png", limits),
    }


def painted(value: Any, limits: Limits) -> Path:
    """Return the mask of an editor's value, as a file beside the uploads.

    Raises InputError for anything that the editor does not send, and for an editor without a stroke.
    """
    layers = value.get("layers") if isinstance(value, Mapping) else None
    paths = [uploaded_path(each, "mask") for each in layers or ()]
    data, name = (_inside(paths[0], each) for each in (MASK, _NAME)) if len(paths) == 1 else (None, None)
    if data is not None and name is not None:
        return keep(data, name.decode(errors="replace"), limits)
    alphas = [_alpha(path) for path in paths]
    white = np.maximum.reduce(alphas) if alphas and len({each.shape for each in alphas}) == 1 else None
    if white is None or not (white >= 128).any():
        raise InputError("mask: nothing is painted; paint where the picture should change, or turn the mask off")
    buffer = io.BytesIO()
    Image.fromarray(white).save(buffer, format="png")
    return keep(buffer.getvalue(), "mask.png", limits)


def _inside(path: Path, setting: str) -> bytes | None:
    """Return what `editor_value` put into a layer."""
    try:
        return png.read_input(path, setting)
    except InputError:
        return None


def _alpha(path: Path) -> np.ndarray:
    """Return the opacity of a layer, (H, W) uint8."""
    with without_folder(path):
        image = InputPicture.read(str(path), MASK).open()
        return np.asarray(image.convert("RGBA").getchannel("A"))


def _kept(image: Image.Image, name: str, limits: Limits) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="png", compress_level=1)
    return str(keep(buffer.getvalue(), name, limits))

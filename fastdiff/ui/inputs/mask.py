"""Masks that users paint over the start picture: white is painted anew."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.input_picture import InputPicture
from fastdiff.ui.inputs.uploaded import keep, uploaded_path, without_folder

MASK = "mask"  # its name inside a PNG
NAME = "mask-name"  # so is the name of its file


def build_editor() -> gr.ImageEditor:
    """Return the editor, which is hidden. It has no `change` event, so that strokes travel only with a run."""
    editor = gr.ImageEditor(
        label="Mask",
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


def painted(value: Any, most: int) -> Path:
    """Return the mask of an editor's value, as a file beside the uploads, which have at most `most` bytes.

    A restored mask without new strokes is the same file. Raises InputError for anything that the editor does not send,
    and for an editor without a stroke.
    """
    layers = value.get("layers") if isinstance(value, Mapping) else None
    paths = [uploaded_path(each, "mask") for each in layers or ()]
    data, name = (_inside(paths[0], each) for each in (MASK, NAME)) if len(paths) == 1 else (None, None)
    if data is not None and name is not None:
        return keep(data, name.decode(errors="replace"), most)
    alphas = [_alpha(path) for path in paths]
    white = np.maximum.reduce(alphas) if alphas and len({each.shape for each in alphas}) == 1 else None
    if white is None or not (white >= 128).any():
        raise InputError("mask: nothing is painted; paint where the picture should change, or turn the mask off")
    buffer = io.BytesIO()
    Image.fromarray(white).save(buffer, format="png")
    return keep(buffer.getvalue(), "mask.png", most)


def _inside(path: Path, setting: str) -> bytes | None:
    """Return what the page put into a layer of a mask that it restored, or None."""
    try:
        return png.read_input(path, setting)
    except InputError:
        return None


def _alpha(path: Path) -> np.ndarray:
    """Return the opacity of a layer, (H, W) uint8."""
    with without_folder(path):
        image = InputPicture.read(str(path), MASK).open()
        return np.asarray(image.convert("RGBA").getchannel("A"))

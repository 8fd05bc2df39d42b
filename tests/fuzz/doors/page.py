"""The page as a door: calls of its API, and uploads of PNGs."""

import asyncio
import functools
import inspect
import io
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.hosting.models import Models
from fastdiff.requests import png
from fastdiff.ui.api import add_api
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.parts.upload import read_record
from fastdiff.ui.serving.store import Store
from fastdiff.ui.shared import Shared
from tests.fuzz.doors.outcomes import Options, Outcome, guarded
from tests.fuzz.edits import PNG_NAME
from tests.fuzz.named.image_prompts import ip_adapters
from tests.fuzz.values import OBJECTS, PROMPT
from tests.ui.history.unserved import upload


@functools.cache
def functions() -> tuple[Shared, Callable[..., Any], Callable[[], Any]]:
    """Return what the page shares, and the functions of its API."""
    shared = Shared(Models(device="cpu"))

    async def build() -> gr.Blocks:  # without an event loop Gradio creates some and never closes them
        with gr.Blocks() as page:
            add_api(page, shared, Limits(pictures=4, steps=20, side=64, batch_size=4), Store(Path("unused")))
        return page

    generate, list_models = (inspect.unwrap(each.fn) for each in asyncio.run(build()).fns.values())
    return shared, generate, list_models


def call(folder: Path, what: str, options: Options) -> Outcome:
    """Call the page's API, or upload a PNG."""
    os.environ["GRADIO_TEMP_DIR"] = str(folder.parent / "out")
    try:
        return PAGE[what](folder, {name: OBJECTS[value]() for name, value in options})
    finally:
        del os.environ["GRADIO_TEMP_DIR"]


async def _last(views: AsyncIterator[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [view async for view in views][-1]


@guarded
def _api(folder: Path, options: dict[str, Any]) -> list[str]:
    shared, generate, _ = functions()
    shared.models = Models(folder.parent, device="cpu")  # with nothing loaded
    given = {"model": f"./{folder.name}", "num_images": 1, "steps": 1}
    given |= {"prompt": PROMPT} if (folder / "tokenizer").is_dir() else {}
    try:
        files = asyncio.run(_last(generate(**given | options)))
    except gr.Error as error:
        raise InputError(str(error.message)) from None
    for file in files:
        with Image.open(file["path"]) as image:
            image.load()
        png.read_settings(file["path"])
    return []


@guarded
def _image_prompt(folder: Path, options: dict[str, Any]) -> list[str]:
    """Draw with the IP-Adapter and the image encoder of the folder, which the page offers from a folder beside it."""
    place = folder.parent / "adapters"
    place.mkdir()
    for name, write in (
        (ip_adapters.NAME, lambda: ip_adapters.ip_adapter(folder, "plain", "0")),
        (ip_adapters.ENCODER, lambda: ip_adapters.image_encoder(folder, "sound")),
    ):
        if not (folder / name).exists():
            write()
        (folder / name).rename(place / name)
    picture = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(picture, "png")
    (folder.parent / "out").mkdir(exist_ok=True)
    own = {"ip_adapter": f"./{place.name}/{ip_adapters.NAME}", "ip_adapter_image": upload(picture.getvalue(), "a.png")}
    outcome = _api(folder, own | options)
    if str(folder.parent) in outcome.said or "--" in outcome.said:
        return [f"said {outcome.said!r}"]
    if not outcome.is_done and not outcome.problems:
        raise InputError(outcome.said)
    return outcome.problems


@guarded
def _list(folder: Path, options: dict[str, Any]) -> list[str]:
    shared, _, list_models = functions()
    shared.models = Models(folder.parent, device="cpu")
    found = json.loads(json.dumps(list_models()))
    return [] if "emoji64" in [each["name"] for each in found] else ["one bad folder broke the list"]


@guarded
def _upload(folder: Path, options: dict[str, Any]) -> list[str]:
    record = read_record(folder / PNG_NAME, Limits())
    return [] if type(record["seed"]) is int else ["a seed that is not an integer"]


PAGE: dict[str, Callable[[Path, dict[str, Any]], Outcome]] = {
    "generate": _api,
    "image prompt": _image_prompt,
    "models": _list,
    "upload": _upload,
}

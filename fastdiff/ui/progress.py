"""HTML of a running request: a progress bar, and previews of the unfinished pictures."""

import base64
import io
import math
import time
from collections.abc import Iterator

from PIL.Image import Image

from fastdiff.requests import png
from fastdiff.runs.drawing import Progress
from fastdiff.ui.drawing import Drawn
from fastdiff.ui.parts.look import SMALL

PREVIEW_INTERVAL = 0.25  # seconds between two previews
MAX_PREVIEW = SMALL  # larger previews are scaled down, unless a preview_vae decodes them


def bar(progress: Progress, what: str = "") -> str:
    """Return the HTML of a progress bar: step k of n, pictures per second and time left. `what` comes first."""
    step, places, count = progress.step, progress.places, len(progress.run.cells)
    which = f"{places.start + 1} to {places.stop}" if len(places) > 1 else str(places.stop)
    parts = [
        what,
        f"picture {which} of {count}" if count > 1 else "",
        f"step {step.index + 1} of {step.num_steps}",
        f"{progress.rate:.2g} pictures/s",
        _time_left(progress),
        step.notice or "",
    ]
    text = ", ".join(filter(None, parts))
    percent = f"{100 * progress.fraction:.1f}"
    return (
        f'<div class="bar" role="progressbar" aria-label="Progress" aria-valuenow="{percent}">'
        f'<div style="width: {percent}%"></div></div>{text[0].upper()}{text[1:]}'
    )


def _time_left(progress: Progress) -> str:
    seconds = math.ceil(progress.seconds * (1 / progress.fraction - 1))
    return f"{seconds} s left" if seconds < 100 else f"{math.ceil(seconds / 60)} min left"


def with_previews(
    steps: Iterator[tuple[Progress, list[Drawn]]],
) -> Iterator[tuple[Progress, list[Drawn], str | None]]:
    """Yield the steps of a run, each with its `preview`, or with None if the last preview is recent."""
    last = -math.inf
    for progress, drawn in steps:
        is_due = time.monotonic() - last > PREVIEW_INTERVAL
        last = time.monotonic() if is_due else last
        yield progress, drawn, preview(progress) if is_due else None


def preview(progress: Progress) -> str:
    """Return the HTML of the batch's unfinished pictures side by side, as large as the finished ones will be."""
    images, is_whole = zip(progress.places, progress.step.preview(), strict=True), progress.step.draft is not None
    frames = "".join(
        _frame(f"Preview of seed {progress.run.cells[place].seed}", image, is_whole) for place, image in images
    )
    return f'<div class="previews" data-step="{progress.step.index + 1}">{frames}</div>'


def _frame(text: str, image: Image, is_whole: bool) -> str:
    if not is_whole:
        image.thumbnail((MAX_PREVIEW, MAX_PREVIEW))
    is_small = max(image.size) <= MAX_PREVIEW
    size = f"--w: {image.width}px; --ratio: {image.width / image.height}"
    small = "data-small " if is_small else ""
    return f'<div class="frame"><img alt="{text}" {small}style="{size}" src="{_data_url(image, is_small)}"></div>'


def _data_url(image: Image, is_small: bool) -> str:
    """Return an image as a URL: PNG if it is small, else JPEG, which takes less time."""
    kind, content = ("png", png.encode(image)) if is_small else ("jpeg", _jpeg(image))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _jpeg(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="jpeg")
    return buffer.getvalue()

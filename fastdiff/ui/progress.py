"""HTML of a running request: a progress bar, and previews of the unfinished pictures."""

import base64
import io
import math
import time
from collections.abc import Generator, Iterable
from contextlib import closing

from PIL.Image import Image

from fastdiff.requests import png
from fastdiff.requests.request import AXES
from fastdiff.runs.drawing import Progress, Run
from fastdiff.ui.drawing import Drawn
from fastdiff.ui.serving.look import SMALL

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


class View:
    """The state of a run, for the page. The thread that draws writes it, other threads read it."""

    def __init__(
        self, name: str = "", run: Run | None = None, notices: Iterable[str] = (), has_previews: bool = True
    ) -> None:
        """name: of the side of a comparison. run: None for a sheet."""
        self.interval = PREVIEW_INTERVAL if has_previews else math.inf
        self.name, self.run, self.notices = name, run, list(notices)
        self.bar = self.live = self.step = ""  # HTML; `step` is text
        self.seconds = self.fraction = 0.0
        self.drawn: list[Drawn] = []  # in order; a sheet comes before its pictures

    def follow(self, steps: Generator[tuple[Progress, list[Drawn]], None, None]) -> Generator[float, None, None]:
        """Take the steps of the run, and yield the finished fraction after each."""
        last = time.monotonic() - 2 * PREVIEW_INTERVAL
        with closing(steps):  # also after an error in here, or other runs would wait for this one
            for progress, drawn in steps:
                is_sheet = bool(drawn) and AXES in drawn[0].record
                self.drawn = drawn + self.drawn if is_sheet else self.drawn + drawn
                self.bar = bar(progress, self.name)
                self.seconds, self.fraction = progress.seconds, progress.fraction
                self.step = f"step {progress.step.index + 1} of {progress.step.num_steps}"
                if time.monotonic() - last > self.interval:
                    self.live, last = preview(progress), time.monotonic()
                yield progress.fraction
        self.live = ""


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

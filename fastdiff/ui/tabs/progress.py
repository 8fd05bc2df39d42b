"""HTML of a run under way: a bar with the step, and the pictures as the model sees them now."""

import base64
import io

from PIL.Image import Image

from fastdiff.runs.drawing import Progress

PREVIEW_INTERVAL = 0.25  # seconds between two previews
MAX_PREVIEW = 256  # pixels; larger pictures are scaled down


def bar(progress: Progress, what: str = "") -> str:
    """HTML: a progress bar with step k of n and pictures per second; `what` comes first."""
    step, places, count = progress.step, progress.places, len(progress.run.cells)
    which = f"{places.start + 1} to {places.stop}" if len(places) > 1 else str(places.stop)
    parts = [
        what,
        f"picture {which} of {count}" if count > 1 else "",
        f"step {step.index + 1} of {step.num_steps}",
        f"{progress.rate:.2g} pictures/s",
        step.notice or "",
    ]
    text = ", ".join(filter(None, parts))
    percent = f"{100 * progress.fraction:.1f}"
    return (
        f'<div class="bar" role="progressbar" aria-label="Progress" aria-valuenow="{percent}">'
        f'<div style="width: {percent}%"></div></div>{text[0].upper()}{text[1:]}'
    )


def preview(progress: Progress) -> str:
    """HTML: the unfinished pictures of the batch side by side."""
    images = "".join(
        f'<img alt="Preview of seed {progress.run.cells[place].seed}" src="{_data_url(image)}">'
        for place, image in zip(progress.places, progress.step.preview(), strict=True)
    )
    return f'<div class="previews" data-step="{progress.step.index + 1}">{images}</div>'


def _data_url(image: Image) -> str:
    image.thumbnail((MAX_PREVIEW, MAX_PREVIEW))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

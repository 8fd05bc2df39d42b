"""How a running job looks: a bar with the step, and the pictures as the model sees them now."""

import base64
import io

from fastdiff.ui.jobs import Progress

PREVIEW_INTERVAL = 0.25  # seconds between two previews
MAX_PREVIEW = 256  # pixels; larger pictures are scaled down


def bar(progress: Progress, what: str = "") -> str:
    """HTML: a progress bar with step k of n and pictures per second; `what` comes first."""
    step, batch, count = progress.step, progress.batch, len(progress.job.pictures)
    places = f"{batch.start + 1} to {batch.stop}" if len(batch) > 1 else str(batch.stop)
    parts = [
        what,
        f"picture {places} of {count}" if count > 1 else "",
        f"step {step.index + 1} of {step.num_steps}",
        f"{progress.rate:.2g} pictures/s",
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
        f'<img alt="Preview of seed {picture.seed}" src="{_data_url(image)}">'
        for picture, image in zip(
            progress.job.pictures[progress.batch.start : progress.batch.stop], progress.step.preview(), strict=True
        )
    )
    return f'<div class="previews" data-step="{progress.step.index + 1}">{images}</div>'


def _data_url(image) -> str:
    image.thumbnail((MAX_PREVIEW, MAX_PREVIEW))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

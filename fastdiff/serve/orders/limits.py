"""The limits of each request."""

from dataclasses import dataclass

from fastdiff.runs.drawing import Run
from fastdiff.serve.wire.errors import ApiError, invalid

MEGA = 1_000_000


@dataclass(frozen=True)
class Limits:
    """The limits of each request, and of all together."""

    batch: int | None = None  # pictures that share a step; None: as many as the memory allows
    requests: int = 64  # drawn at a time
    queue: int = 64  # more requests that wait
    streams: int = 16  # open streams of a key
    side: int = 2048  # pixels of a picture
    work: float = 1000.0  # millions of pixels x steps of all pictures of a request
    body: int = 2**26  # bytes
    body_seconds: float = 60.0  # for the whole body
    header_seconds: float = 20.0  # for the headers
    send_seconds: float = 60.0  # for a part of an answer that the client does not read
    seconds: float = 600.0  # for waiting and drawing
    minutes: float | None = None  # that drawing may take, by the measured speed; None: no limit

    def check(self, run: Run) -> None:
        """Raise ApiError for pictures that are too large, and for too much work."""
        width, height = run.size or (0, 0)
        if max(width, height) > self.side:
            raise invalid("size", f"{width}x{height} is too large; a side has at most {self.side} pixels")
        work = work_of(run)
        if work > self.work:
            steps = run.request.num_inference_steps or 1
            problem = (
                f"{len(run.cells)} x {width}x{height} x {steps} steps are {work:,.0f} million pixels x steps, and "
            )
            remedy = f"the limit is {self.work:,.0f}; ask for fewer pictures or steps, or a smaller size"
            raise ApiError(400, problem + remedy, code="too_much_work")


def work_of(run: Run) -> float:
    """Return the millions of pixels x steps of all pictures of a run."""
    width, height = run.size or (0, 0)
    return width * height * (run.request.num_inference_steps or 1) * len(run.cells) / MEGA

"""Budget: the time limit of a request, by the measured speed."""

import math
from collections import defaultdict
from collections.abc import Iterator

from fastdiff.errors import InputError
from fastdiff.runs.drawing import Progress, Run


class Budget:
    """The time limit of a request. Its time is estimated as pictures x steps x the measured time of a step."""

    def __init__(self, minutes: float | None = None) -> None:
        """minutes: the most that a request may take; None for no limit."""
        self.minutes = minutes
        # seconds per step and picture, by what `_model` returns, and then by the picture's number of pixels
        self._seconds: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)

    def check(self, *runs: Run, spent: float = 0.0) -> None:
        """Raise InputError if `runs` are estimated to take too long.

        The estimate uses the slowest measured step of pictures that are as large or smaller.

        spent: the seconds that the request has already taken.
        """
        self._refuse_over(spent + sum(self._known_seconds(run) * _steps(run) for run in runs))

    def _known_seconds(self, run: Run) -> float:
        """Return the estimated seconds per step and picture, or 0 if nothing was measured."""
        measured = [*self._seconds[_model(run)].items()]  # a copy: another thread may measure meanwhile
        known = [seconds for pixels, seconds in measured if pixels <= _pixels(run)]
        return max(known, default=0.0)

    def watch(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """Yield and time the steps of a run. Raises InputError once the estimate exceeds the limit.

        Waiting for other runs does not count.
        """
        fastest, before = math.inf, 0.0
        for count, progress in enumerate(steps, 1):
            seconds = progress.seconds - progress.waited
            fastest, before = min(fastest, (seconds - before) / len(progress.places)), seconds
            yield progress
            if count > 1:  # the first step may also compile and load
                of_size = self._seconds[_model(progress.run)]
                of_size[_pixels(progress.run)] = min(fastest, of_size.get(_pixels(progress.run), math.inf))
                self._refuse_over(seconds + fastest * _steps(progress.run) * (1 - progress.fraction))

    def _refuse_over(self, seconds: float) -> None:
        if self.minutes is not None and seconds > 60 * self.minutes:
            raise InputError(
                f"this would take about {_words(seconds)}, and the limit is {_words(60 * self.minutes)} per request; "
                "choose fewer pictures or steps, or a smaller size"
            )


def _model(run: Run) -> tuple[object, ...]:
    return run.card.source, run.request.precision, run.request.control, run.request.ip_adapter


def _pixels(run: Run) -> int:
    return math.prod(run.size or (1,))


def _steps(run: Run) -> int:
    """Return the total number of steps of all pictures."""
    return len(run.cells) * (run.request.num_inference_steps or 1)


def _words(seconds: float) -> str:
    count, unit = (seconds, "second") if seconds < 90 else (seconds / 60, "minute")
    return f"{round(count):,} {unit}{'' if round(count) == 1 else 's'}"

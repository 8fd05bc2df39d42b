"""The progress of a run on stderr: a bar in a terminal, and a line every ten seconds in a log or a pipe."""

import contextlib
import sys
import time
from typing import Any

SECONDS = 10.0  # between two lines
_BAR = "{percentage:3.0f}%|{bar}| {n:.1f}/{total:.0f} {unit} [{elapsed}<{remaining}, {rate_noinv_fmt}]"


def in_terminal() -> bool:
    """Return whether a person watches stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed
        return sys.stderr.isatty()
    return False


def show(total: int, unit: str, *, initial: float = 0, quiet: bool = False) -> Any:
    """Return tqdm's bar, or what has its `n`, `update` and `close` and prints lines. `quiet`: nothing is shown."""
    from tqdm import tqdm

    if quiet or in_terminal():
        return tqdm(total=total, initial=initial, unit=unit, bar_format=_BAR, file=sys.stderr, disable=quiet)
    return Lines(total, unit, initial)


class Lines:
    """Progress in lines, without carriage returns."""

    def __init__(self, total: int, unit: str, initial: float = 0) -> None:
        self.total, self.unit, self.n, self._initial = total, unit, initial, initial
        self.start_t = self._said = time.time()

    def update(self, count: float) -> None:
        """Add `count`, and print a line if the last one is SECONDS old."""
        self.n += count
        now = time.time()
        if now - self._said >= SECONDS and self.n < self.total:
            self._said = now
            with contextlib.suppress(OSError):
                print(f"fastdiff: {self._line(now)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing: the caller prints the last line."""

    def _line(self, now: float) -> str:
        from tqdm import tqdm

        text = f"{self.n:.1f} of {self.total} {self.unit}"
        rate = (self.n - self._initial) / max(now - self.start_t, 1e-9)
        if rate <= 0:
            return text
        return f"{text}, {rate:.3g} {self.unit}/s, {tqdm.format_interval((self.total - self.n) / rate)} left"

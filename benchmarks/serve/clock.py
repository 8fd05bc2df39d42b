"""Lines on stderr that say when a benchmark did what."""

import sys
import time


class Clock:
    """The time since a benchmark began, in all of its processes. It may be pickled."""

    def __init__(self) -> None:
        self._began = time.time()

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        print(f"{time.time() - self._began:7.1f} s  {text}", file=sys.stderr, flush=True)

"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

TIMEOUT = 250  # seconds, which only stop what hangs: below pytest's own, so that the test can say what hung


def wait_for(condition: Callable[[], object], seconds: float = TIMEOUT) -> None:
    """Wait until `condition` holds; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)

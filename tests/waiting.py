"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until `condition` holds; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)

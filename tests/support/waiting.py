"""Wait for another thread or process."""

import time
from collections.abc import Callable

TIMEOUT = 250  # seconds; only for what hangs. Shorter than pytest's timeout, so that the test can say what hung


def wait_for(condition: Callable[[], object], seconds: float = TIMEOUT) -> None:
    """Wait until `condition` holds. Fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)

"""Limits on the CPU time of a block of code."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_once(seconds: float) -> Iterator[None]:
    """Fail if the block takes `seconds` of CPU time or more. Other processes and garbage collection do not count."""
    collects = gc.isenabled()
    gc.disable()
    start = time.process_time()
    try:
        yield
        worked = time.process_time() - start
    finally:
        if collects:
            gc.enable()
    assert worked < seconds

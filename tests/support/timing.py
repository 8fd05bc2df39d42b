"""The time that a piece of code works."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_once(seconds: float) -> Iterator[None]:
    """Fail if the block works for so long. Neither other processes nor a collection of all older objects count."""
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

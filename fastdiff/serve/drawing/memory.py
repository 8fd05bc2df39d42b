"""The memory of this process and of its GPU."""

import resource
import sys
from collections.abc import Iterator


def memory_of_process() -> dict[str, int]:
    """Return the kinds of memory of this process, and their bytes."""
    return dict(_kinds())


def _kinds() -> Iterator[tuple[str, int]]:
    unit = 1 if sys.platform == "darwin" else 1024
    yield "process_peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            yield "process", int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not on Linux
        pass
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "gpu", torch.cuda.memory_allocated()
        yield "gpu_reserved", torch.cuda.memory_reserved()
        yield "gpu_peak", torch.cuda.max_memory_allocated()

"""The number of processor cores."""

import os


def num_cores() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1

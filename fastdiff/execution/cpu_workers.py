"""Pictures on the CPU, each computed alone, as its bits must not depend on its batch: side by side, or in turn."""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from fastdiff.kernels.host.recording import recorder

Result = TypeVar("Result")


def map_pictures(function: Callable[..., Result], *batches: Tensor) -> Iterator[Result]:
    """Return `function` of each picture of the batches (N, ...) alone; on the CPU they run side by side, from now on.

    function takes a picture (1, ...) of each batch. A batched convolution of torch on the CPU gives a picture other
    bits in other company, so there it is called alone.
    """
    side_by_side = batches[0].device.type == "cpu" and recorder() is None  # which listens in this thread alone
    if not side_by_side:
        return map(function, *_pictures(batches))
    return _cpu_workers().map(_inferring(function), *_pictures(batches))


def map_in_turn(function: Callable[..., Result], *batches: Tensor) -> Iterator[Result]:
    """As `map_pictures`, but one after another, each by all threads: a single one is done in half of the time.

    Side by side, threads of Python wait for one another between the operations, the longer the shorter those are.
    """
    return map(_inferring(function), *_pictures(batches))


def _inferring(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function` without what torch notes for gradients: its results may be read, and not be changed in place."""
    return torch.inference_mode()(function)


def _pictures(batches: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    return [batch.split(1) for batch in batches]


@functools.cache
def _cpu_workers() -> ThreadPoolExecutor:
    """Return Python threads that each run torch with the same number of threads, whatever there is to do.

    The number decides how oneDNN splits a sum, so it depends on the machine alone: one thread each up to four cores.
    """
    cores = torch.get_num_threads()
    workers = min(cores, 4)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fastdiff")
    all_started = threading.Barrier(workers)

    def set_up() -> None:
        all_started.wait()  # every worker takes one of these tasks
        torch.get_num_threads()  # a thread's first call copies the process's setting over its own
        torch.set_num_threads(cores // workers)

    wait([pool.submit(set_up) for _ in range(workers)])
    torch.set_num_threads(cores)  # the setting of this thread, and of threads to come
    return pool

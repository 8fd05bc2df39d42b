"""Compute CPU pictures one by one, in parallel or in turn, so a picture's bits do not depend on its batch."""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from fastdiff.kernels.host.recording import recorder

Result = TypeVar("Result")


THREADS = 4  # of a picture, if the machine has as many; chosen, not measured


def map_pictures(function: Callable[..., Result], *batches: Tensor) -> Iterator[Result]:
    """Yield `function` of each picture (1, ...) of the batches (N, ...).

    On the CPU, torch's batched convolutions give a picture bits that depend on its batch, so each picture is computed
    alone. On many cores, some pictures start now and run in parallel.
    """
    in_parallel = batches[0].device.type == "cpu" and recorder() is None  # a recorder listens only in this thread
    pool = _cpu_workers() if in_parallel else None
    return (
        map(_inferring(function), *_pictures(batches))
        if pool is None
        else pool.map(_inferring(function), *_pictures(batches))
    )


def map_in_turn(function: Callable[..., Result], *batches: Tensor) -> Iterator[Result]:
    """Yield the same as `map_pictures`, but one picture after another, each with all threads."""
    return map(_inferring(function), *_pictures(batches))


def _inferring(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return `function` in inference mode: its results can be read, but not changed in place outside that mode."""
    return torch.inference_mode()(function)


def _pictures(batches: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    return [batch.split(1) for batch in batches]


@functools.cache
def _cpu_workers() -> ThreadPoolExecutor | None:
    """Return a pool of Python threads, each of which runs torch with the same fixed number of threads.

    The number affects how torch splits a sum, so it depends only on the machine. None if there is only one worker.
    """
    cores = torch.get_num_threads()
    workers = cores // THREADS
    if workers < 2:
        return None
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fastdiff")
    all_started = threading.Barrier(workers)

    def set_up() -> None:
        all_started.wait()  # so every worker gets exactly one of these tasks
        torch.get_num_threads()  # a thread's first call copies the process's setting over its own
        torch.set_num_threads(cores // workers)

    wait([pool.submit(set_up) for _ in range(workers)])
    torch.set_num_threads(cores)  # the setting for this thread, and for later threads
    return pool

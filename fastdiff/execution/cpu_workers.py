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


def map_pictures(function: Callable[..., Result], *batches: Tensor) -> Iterator[Result]:
    """Yield `function` of each picture (1, ...) of the batches (N, ...). On the CPU they start now and run in parallel.

    On the CPU, torch's batched convolutions give a picture bits that depend on its batch, so each picture is computed
    alone.
    """
    side_by_side = batches[0].device.type == "cpu" and recorder() is None  # a recorder listens only in this thread
    if not side_by_side:
        return map(function, *_pictures(batches))
    return _cpu_workers().map(_inferring(function), *_pictures(batches))


def map_in_turn(function: Callable[..., Result], *batches: Tensor) -> Iterator[Result]:
    """Yield the same as `map_pictures`, but one picture after another, each with all threads.

    A single picture takes half of the time. In parallel, Python threads wait for each other between operations, and the
    wait is relatively longer for short operations.
    """
    return map(_inferring(function), *_pictures(batches))


def _inferring(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return `function` in inference mode: its results can be read, but not changed in place outside that mode."""
    return torch.inference_mode()(function)


def _pictures(batches: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    return [batch.split(1) for batch in batches]


@functools.cache
def _cpu_workers() -> ThreadPoolExecutor:
    """Return a pool of Python threads, each of which runs torch with the same fixed number of threads.

    The number affects how oneDNN splits a sum, so it depends only on the machine: one each on up to four cores.
    """
    cores = torch.get_num_threads()
    workers = min(cores, 4)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fastdiff")
    all_started = threading.Barrier(workers)

    def set_up() -> None:
        all_started.wait()  # so every worker gets exactly one of these tasks
        torch.get_num_threads()  # a thread's first call copies the process's setting over its own
        torch.set_num_threads(cores // workers)

    wait([pool.submit(set_up) for _ in range(workers)])
    torch.set_num_threads(cores)  # the setting for this thread, and for later threads
    return pool

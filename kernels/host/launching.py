"""How every kernel is launched, and what the card it is launched on can do."""

import gc
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from multiprocessing.process import BaseProcess
from threading import Lock, RLock
from types import SimpleNamespace
from typing import overload

import torch
from torch import Tensor

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.recording import recorder

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that kernels take
# Triton's interpreter stands for a small card that can do all.
INTERPRETER_CAPABILITY = (9, 0)
INTERPRETER_MULTIPROCESSORS = 8
PATIENCE = 30.0  # seconds for the processes that compile

_interpreter = Lock()  # which runs one kernel at a time
_compiling = RLock()  # no process is forked while another thread compiles
_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


def launch(
    kernel, grid: tuple[int, ...], *args, num_warps: int, num_stages: int = 1, fp_fusion: bool = True, **constexprs
) -> None:
    """kernel[grid](*args, **constexprs) on the device of the first tensor, which need not be the current device.

    fp_fusion: multiplications and additions become one operation; without it the bits are those of separate ones.
    """
    tensors = (getattr(arg, "base", arg) for arg in args)  # `base`: of a descriptor
    device, listener = next(tensor.device for tensor in tensors if isinstance(tensor, Tensor)), recorder()
    # fp_fusion always said, because Triton's default changes with version 3.10, and with it the bits
    options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=fp_fusion)
    options["launch_pdl"] = capability(device) >= (9, 0)  # see `await_inputs`
    run = partial(kernel.run, *args, grid=grid, warmup=_only_compiles.get(), **options, **constexprs)
    with torch.cuda.device(device) if device.type == "cuda" else _interpreter:
        run() if listener is None else listener.launch(kernel, run)


class _ByProcesses(Executor):
    """Makes what is submitted, kernels, in forked processes, for the files that Triton keeps of them; then from these.

    By threads it would take seconds: Python's part of a compilation, and more of it, holds the interpreter's lock. A
    process that fails or hangs costs time alone, as its kernels are then compiled here.
    """

    def __init__(self) -> None:
        self.jobs: list[tuple[Future, Callable]] = []

    def submit(self, make: Callable) -> Future:
        self.jobs.append((Future(), make))
        return self.jobs[-1][0]

    def finish(self) -> None:
        each = -(-len(self.jobs) // (os.cpu_count() or 1)) or 1
        count = -(-len(self.jobs) // each) or 1
        processes = _fork([[make for _, make in self.jobs[i::count]] for i in range(1, count)])
        self._make(self.jobs[::count])  # a share of its own, which readies the compiler for later forks
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        self._make(self.jobs)

    @staticmethod
    def _make(jobs: list[tuple[Future, Callable]]) -> None:
        for future, make in jobs:
            if not future.done():
                try:
                    future.set_result(make())
                except Exception as error:
                    future.set_exception(error)


def _fork(shares: list[list[Callable]]) -> list[BaseProcess]:
    """A process for each share of the kernels, as far as processes can be had."""
    context, started = multiprocessing.get_context("fork"), []
    driver = triton.runtime.driver.active
    target, launcher = driver.get_current_target(), getattr(driver, "launcher_cls", None)
    with warnings.catch_warnings(), suppress(OSError, AssertionError):  # no memory; no children for a daemon
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the processes have no part of
        for share in shares:
            process = context.Process(target=_compile_apart, args=(share, target, launcher), daemon=True)
            process.start()
            started.append(process)
    return started


def _compile_apart(jobs: list[Callable], target, launcher: Callable | None) -> None:
    """In a forked process, where CUDA must not be touched: device code asks for `target` alone."""
    gc.disable()  # it might free what is CUDA's
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    for make in jobs:
        with suppress(Exception):  # it is raised again where the kernel is made once more
            kernel = make()
            if launcher is not None:
                launcher(kernel.src, kernel.metadata)  # C code, which Triton 3.6 compiles too
    os._exit(0)  # nothing of the parent's is to be tidied up here


@contextmanager
def only_compiling() -> Iterator[None]:
    """Inside, kernels are not launched but compiled, all side by side; the block ends when they are ready.

    What a function is about to launch takes a second this way instead of ten. What it computes is undefined. A kernel
    that does not compile is an error where it is launched.
    """
    compiler = _ByProcesses()
    with _compiling:
        token = _only_compiles.set(True)
        try:
            with triton.AsyncCompileMode(compiler, ignore_errors=True):
                try:
                    yield
                finally:  # after an error too: Triton waits for what was submitted
                    compiler.finish()
        finally:
            _only_compiles.reset(token)


@overload
def side_by_side(tensor: Tensor) -> Tensor: ...
@overload
def side_by_side(tensor: None) -> None: ...
@overload
def side_by_side(tensor: Tensor | None) -> Tensor | None: ...
def side_by_side(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its channels side by side, as kernels read them: itself, or a copy."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETER_CAPABILITY


def is_sm_90(device: torch.device) -> bool:
    """Whether it is such a card as our kernels and torch's library were measured on."""
    return device.type == "cuda" and capability(device) == (9, 0)


def has_descriptors(device: torch.device) -> bool:
    """Whether the card copies tiles by tensor descriptors, and has the shared memory for such tiles.

    That is sm_90 to sm_110; consumer cards from sm_120 on have 99 KB.
    """
    return (9, 0) <= capability(device) < (12, 0)


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def descriptor(tensor: Tensor, block: list[int]):
    """A tensor descriptor of a contiguous tensor, read in blocks of this shape; outside the tensor are zeros."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # absent where triton is

    return TensorDescriptor.from_tensor(tensor, block)

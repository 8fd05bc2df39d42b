"""Run Gluon kernels on the CPU, which Triton's interpreter cannot do. Partitions are threads, and barriers block them.

Asynchronous work happens as late as the kernel's own waits allow. A load fills shared memory at the wait for its
barrier, a product reads it at the wait for the product, and a store reads it when its buffer is requested again. So a
buffer that is read or filled too early gives wrong numbers. If a barrier does not get all its bytes, all partitions
wait, which is an error at once.

Numbers in the kernel are float32; tensors may have any dtype.
"""

import importlib
import math
import operator
import sys
from collections.abc import Callable
from contextlib import contextmanager
from threading import Condition, Thread, current_thread, local
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastdiff.kernels.plans.cpu import ACTIVATIONS

LANGUAGE = "fastdiff.kernels.device.hopper.language"
PATIENCE = 60.0  # seconds that a partition waits for another before the test fails

_changed = Condition()
_running = local()  # per thread: program, programs, its crew, pending products and stores


class Scalar:
    """A number in a kernel."""

    __array_ufunc__ = None  # makes arrays call `backward`

    def __init__(self, value: Any):
        self.value = getattr(value, "value", value)

    def to(self, dtype: Any) -> "Scalar":
        return self

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)


def _operators() -> None:
    names = "add sub mul floordiv mod and_ or_ xor rshift lshift gt ge lt le eq"
    for name in names.split():
        function = getattr(operator, name)
        special = name.strip("_")

        def forward(self, other, function=function):
            result = function(self.value, getattr(other, "value", other))
            return Scalar(result) if np.ndim(result) == 0 else result

        def backward(self, other, function=function):
            result = function(other, self.value)
            return Scalar(result) if np.ndim(result) == 0 else result

        setattr(Scalar, f"__{special}__", forward)
        setattr(Scalar, f"__r{special}__", backward)


_operators()


class Values(np.ndarray):
    """A tensor in a kernel."""

    __array_priority__ = 1000
    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> "Values":
        return self

    def permute(self, order: tuple[int, ...]) -> "Values":
        return self.transpose(order)

    def split(self) -> tuple["Values", "Values"]:
        return self[..., 0], self[..., 1]


def _values(array: Any) -> Values:
    return np.asarray(array).view(Values)


class Crew:
    """The threads that run a program in parallel. They are stuck when all active threads wait."""

    def __init__(self, size: int):
        self.active, self.stuck = size, False
        self.waiting: dict[Thread, Callable[[], Any]] = {}  # thread -> the condition that it waits for

    def wait_for(self, is_so: Callable[[], Any]) -> None:
        """Wait for a condition. The caller must hold `_changed`."""
        self.waiting[current_thread()] = is_so
        self._look()
        _changed.wait_for(lambda: is_so() or self.stuck)
        del self.waiting[current_thread()]
        assert is_so(), "a barrier that never completes"

    def leave(self) -> None:
        with _changed:
            self.active -= 1
            self._look()

    def _look(self) -> None:
        if len(self.waiting) == self.active and not any(is_so() for is_so in self.waiting.values()):
            self.stuck = True
            _changed.notify_all()


class Barrier:
    """An mbarrier: a phase ends after `count` arrivals and all the bytes that they announced."""

    def __init__(self) -> None:
        self.count, self.phase, self.arrived, self.bytes = 1, 0, 0, 0
        self.loads: list[Callable[[], int]] = []  # each returns its bytes

    def init(self, count: int) -> None:
        self.count = count

    def arrive(self, number: int = 0) -> None:
        with _changed:
            assert self.arrived < self.count, "too many arrivals in a phase"
            self.arrived, self.bytes = self.arrived + 1, self.bytes + number
            self._end_phase()

    def wait(self, parity: Any) -> None:
        with _changed:
            while self.phase % 2 == int(parity) % 2:
                _running.crew.wait_for(lambda: self.phase % 2 != int(parity) % 2 or self.loads)
                self.bytes -= sum(self.loads.pop()() for _ in range(len(self.loads)))
                self._end_phase()

    def _end_phase(self) -> None:
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0
        _changed.notify_all()


class Memory:
    """Shared memory, or a view of it. Its numbers are as far apart as elements of its dtype, a torch dtype."""

    def __init__(self, array: np.ndarray, dtype: Any):
        self.array, self.dtype, self.shape, self.layout = array, dtype, array.shape, None

    def index(self, i: Any) -> Any:
        piece = self.array[int(i)]
        return piece[0] if self.array.dtype == object else Memory(piece, self.dtype)

    def permute(self, order: tuple[int, ...]) -> "Memory":
        return Memory(self.array.transpose(order), self.dtype)

    def reshape(self, shape: list[int]) -> "Memory":
        return reinterpret(self, self.dtype, shape, None)

    def load(self, layout: Any) -> Values:
        return _values(self.array.copy())

    def store(self, value: np.ndarray) -> None:
        self.array[...] = value


class Descriptor:
    """A tensor descriptor: blocks of a tensor, with zeros outside the tensor."""

    def __init__(self, made: Any):
        self.tensor = torch.as_strided(made.base, list(made.shape), list(made.strides))
        self.block_shape, self.dtype, self.layout = list(made.block_shape), self.tensor.dtype, None

    def inside(self, coordinates: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the slices of the tensor, and of the block, where they overlap."""
        first = [int(each) for each in coordinates]
        assert len(first) == len(self.block_shape)
        low = [max(0, -at) for at in first]
        high = [
            min(size, whole - at) for at, size, whole in zip(first, self.block_shape, self.tensor.shape, strict=True)
        ]
        high = [max(lower, upper) for lower, upper in zip(low, high, strict=True)]
        bounds = list(zip(low, high, first, strict=True))
        return tuple(slice(a + at, b + at) for a, b, at in bounds), tuple(slice(a, b) for a, b, _ in bounds)


class Pointer:
    """A pointer to a tensor's elements."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0):
        self.tensor, self.offset = tensor, offset

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + getattr(other, "value", other))


def load(pointer: Pointer, mask: Any = True, other: float = 0) -> Values:
    found = np.full(np.shape(pointer.offset), other, np.float32)
    memory = pointer.tensor.as_strided((pointer.tensor.untyped_storage().size() // pointer.tensor.itemsize,), (1,), 0)
    mask = np.broadcast_to(np.asarray(mask), found.shape)
    places = np.asarray(pointer.offset)[mask] + pointer.tensor.storage_offset()
    found[mask] = memory[torch.from_numpy(places)].float().numpy()
    return _values(found)


def store(pointer: Pointer, value: np.ndarray, mask: np.ndarray) -> None:
    mask = np.broadcast_to(mask, value.shape)
    places = np.broadcast_to(np.asarray(pointer.offset), value.shape)[mask]
    pointer.tensor.view(-1)[torch.from_numpy(places)] = torch.from_numpy(np.asarray(value)[mask])


def async_load(descriptor: Descriptor, coordinates: list[Any], barrier: Barrier, into: Memory) -> None:
    there, here = descriptor.inside(coordinates)
    assert list(into.array.shape) == descriptor.block_shape
    into.array[...] = np.nan

    def copy() -> int:
        into.array[...] = 0
        into.array[here] = descriptor.tensor[there].float().numpy()
        return into.array.size * descriptor.tensor.itemsize

    with _changed:
        barrier.loads.append(copy)
        _changed.notify_all()


def async_store(descriptor: Descriptor, coordinates: list[Any], memory: Memory) -> None:
    there, here = descriptor.inside(coordinates)

    def copy() -> None:
        descriptor.tensor[there] = torch.from_numpy(memory.array[here].copy()).to(descriptor.tensor.dtype)

    _running.stores.append(copy)


def store_wait(pending: int) -> None:
    while len(_running.stores) > pending:
        _running.stores.pop(0)()


def warpgroup_mma(a: Memory | Values, b: Memory, acc: Values, is_async: bool, use_acc: bool = True) -> Values:
    def multiply() -> None:
        acc[...] = (acc if use_acc else 0) + getattr(a, "array", a) @ b.array

    _running.products.append(multiply)
    return acc


def warpgroup_mma_wait(pending: int, deps: list[Values]) -> Any:
    while len(_running.products) > pending:
        _running.products.pop(0)()
    return tuple(deps) if len(deps) > 1 else deps[0]


def reinterpret(memory: Memory, dtype: Any, shape: list[int], layout: Any) -> Memory:
    flat = memory.array.reshape(-1)
    step = dtype.itemsize // memory.dtype.itemsize  # elements of the memory's dtype per element of `dtype`
    assert math.prod(shape) * step <= flat.size and np.shares_memory(flat, memory.array)
    return Memory(flat[: math.prod(shape) * step : step].reshape(shape), dtype)


def pieces(memory: Memory, buffer: Any, size: int, first: int, count: int) -> Memory:
    at = int(buffer) * size + int(first)
    return Memory(memory.array[at : at + count], memory.dtype)


def allocate(dtype: Any, shape: list[int], layout: Any) -> Memory:
    if dtype == "int64":
        return Memory(np.array([[Barrier()] for _ in range(shape[0])], dtype=object), dtype)
    return Memory(np.full(shape, np.nan, np.float32), dtype)


def warp_specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    """Run the partitions in parallel, and raise the first error of a partition."""
    errors: list[BaseException] = []
    place, crew = (_running.program, _running.programs), Crew(len(partitions))

    def run(function: Any, args: tuple[Any, ...]) -> None:
        _running.program, _running.programs, _running.crew = *place, crew
        _running.products, _running.stores = [], []
        try:
            function(*args)
            assert not _running.products and not _running.stores, "asynchronous work without a wait"
        except BaseException as error:
            errors.append(error)
        finally:
            crew.leave()

    threads = [Thread(target=run, args=each, daemon=True) for each in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a layout, which does not affect numbers, or a fence, which is not needed here."""


def _either(function: Callable) -> Callable:
    """Return `function` for two tensors or two numbers."""

    def take(a: Any, b: Any) -> Any:
        result = function(getattr(a, "value", a), getattr(b, "value", b))
        return Scalar(result) if np.ndim(result) == 0 else result

    return take


def activate(x: Values, activation: str) -> Values:
    """Stand in for `device.math.activate`, which is Triton code."""
    function = ACTIVATIONS[None if activation == "none" else activation]
    return _values(function(torch.from_numpy(np.asarray(x))).numpy())


def _gl() -> SimpleNamespace:
    return SimpleNamespace(
        constexpr=Any, int64="int64", float32=np.float32,
        NVMMASharedLayout=_nothing, NVMMADistributedLayout=_nothing, SliceLayout=_nothing, DotOperandLayout=_nothing,
        BlockedLayout=_nothing,
        program_id=lambda axis: Scalar(_running.program), num_programs=lambda axis: Scalar(_running.programs),
        maximum=_either(np.maximum), minimum=_either(np.minimum), cdiv=lambda a, b: Scalar(-(-int(a) // int(b))),
        static_range=range, arange=lambda first, end, layout: _values(np.arange(first, end)),
        zeros=lambda shape, dtype, layout: _values(np.zeros(shape, np.float32)), expand_dims=np.expand_dims,
        sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.max(axis), exp2=np.exp2,
        where=lambda condition, x, other: _values(np.where(condition, x, np.float32(other))),
        convert_layout=lambda x, layout: x, inline_asm_elementwise=_nothing, load=load, store=store,
        allocate_shared_memory=allocate, warp_specialize=warp_specialize,
    )  # fmt: skip


def _language() -> ModuleType:
    """Stand in for `device.hopper.language`."""
    module: Any = ModuleType(LANGUAGE)
    module.gl = _gl()
    module.gluon = SimpleNamespace(
        jit=lambda *args, **kwargs: args[0] if args else lambda function: function,
        constexpr_function=lambda function: function,
    )
    module.mbarrier = SimpleNamespace(
        MBarrierLayout=_nothing,
        init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, parity, pred=True: barrier.wait(parity) if pred else None,
        expect=lambda barrier, number: barrier.arrive(number),
        arrive=lambda barrier, count, pred=True: barrier.arrive() if pred else None,
    )
    module.pieces = pieces
    module.fence_async_shared = _nothing
    for function in (reinterpret, async_load, async_store, store_wait, warpgroup_mma, warpgroup_mma_wait):
        setattr(module, function.__name__, function)
    return module


@contextmanager
def _in_place_of_triton(names: tuple[str, ...]):
    from fastdiff.kernels.device import language, math

    kept = {name: sys.modules.pop(name, None) for name in (LANGUAGE, *names)}
    cuda, tritons = language.cuda, (math.activate, math.LOG2_E)
    sys.modules[LANGUAGE] = _language()
    math.activate, math.LOG2_E = activate, math.LOG2_E.value
    language.cuda = SimpleNamespace(gdc_wait=_nothing, gdc_launch_dependents=_nothing)
    try:
        yield
    finally:
        language.cuda, (math.activate, math.LOG2_E) = cuda, tritons
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def emulated(kernel: str, *modules: str) -> Any:
    """Return a `launch` that runs a kernel on the CPU. The kernel is in the last of these device-code modules."""
    names = tuple(f"fastdiff.kernels.device.hopper.{module}" for module in modules)
    with _in_place_of_triton(names):
        function = [getattr(importlib.import_module(name), kernel, None) for name in names][-1]

    def launch(_: Any, grid: tuple[int], *args: Any, **kwargs: Any) -> None:
        for option in ("num_warps", "num_stages", "fp_fusion", "maxnreg"):
            kwargs.pop(option, None)
        _running.programs, _running.crew = grid[0], Crew(1)
        for _running.program in range(grid[0]):
            function(*map(_argument, args), **{name: _argument(value) for name, value in kwargs.items()})

    return launch


def _argument(value: Any) -> Any:
    """Convert a launch argument for the emulated kernel."""
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    return Pointer(value) if isinstance(value, torch.Tensor) else value

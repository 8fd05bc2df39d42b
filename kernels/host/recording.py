"""Record what a context runs: calls of operations with their kernels, and torch operations outside of them.

Operations, launches and `because` report to the context's recorder, if there is one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff.kernels.host.weights import NAMES, Quantised, Scaled

TORCH = "torch."  # prefix of the names of torch operations
# Operations other than views that neither compute nor copy.
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "set_", "_unsafe_view"}


@dataclass
class Recorded:
    """One call of an operation, or a torch operation outside of any call."""

    operation: str
    shape: str
    flop: int = 0  # of its matrix products, counted in its torch reference
    kernels: list[str] = field(default_factory=list)  # launched by it, in order
    torch: list[str] = field(default_factory=list)  # torch operations run by it
    why: str = ""


class Recorder:
    """The calls of a context, in the order in which they started."""

    def __init__(self) -> None:
        self.calls: list[Recorded] = []
        self.variants: set[str] = set()  # hashes of the compiled kernels launched
        self.open: list[Recorded] = []  # calls that have not ended, the innermost last

    def launch(self, kernel: Any, run: Callable[[], Any]) -> None:
        """Record a launch. `run` launches `kernel` and returns it compiled, or None in Triton's interpreter."""
        if not self.open:
            self.calls.append(Recorded("kernel", ""))
        (self.open or self.calls)[-1].kernels.append(kernel.__name__)
        with _unheard():
            compiled = run()
        if compiled is not None:
            self.variants.add(compiled.hash)

    def torch_operation(self, name: str, shape: str, flop: int) -> None:
        if recorder() is not self:
            return
        if self.open:
            self.open[-1].torch.append(name)
        else:
            self.calls.append(Recorded(f"{TORCH}{name}", shape, flop, torch=[name], why="not one of our operations"))

    @contextmanager
    def call(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        call = Recorded(operation.__name__, describe(args, kwargs), _flop(operation.reference, args, kwargs))
        if self.open:  # the enclosing call's reference already counted this work
            self.open[-1].flop -= call.flop
        self.calls.append(call)
        self.open.append(call)
        try:
            yield
        finally:
            self.open.pop()


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """Return the recorder of this context, if any."""
    return _recorder.get()


@contextmanager
def _unheard() -> Iterator[None]:
    token = _recorder.set(None)
    try:
        yield
    finally:
        _recorder.reset(token)


def because(reason: str | Callable[[], str]) -> None:
    """Record why the current operation runs the way it does. A function is only called if there is a recorder."""
    listener = recorder()
    if listener is not None and listener.open:
        listener.open[-1].why = reason if isinstance(reason, str) else reason()


def besides(reason: str) -> None:
    """Append to the reason that `because` recorded for the current operation."""
    listener = recorder()
    if listener is not None and listener.open:
        call = listener.open[-1]
        call.why = f"{call.why}; {reason}" if call.why else reason


@contextmanager
def record(device: torch.device, listener: Recorder | None = None) -> Iterator[Recorder]:
    """Record what this context runs on the device inside the block. No CUDA graph is replayed there."""
    listener = listener or Recorder()
    token = _recorder.set(listener)
    try:
        with _TorchOperations(device.type, listener.torch_operation):
            yield listener
    finally:
        _recorder.reset(token)


class _TorchOperations(TorchDispatchMode):
    """Dispatch mode that calls tell(name, shape, flop) for each torch operation on a device that computes or copies."""

    def __init__(self, device: str, tell: Callable[[str, str, int], None]):
        super().__init__()
        self.device, self.tell = device, tell

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from torch.utils.flop_counter import flop_registry  # slow to import

        kwargs, packet = kwargs or {}, function._overloadpacket
        if packet not in flop_registry:
            with self:  # in inference mode torch does not decompose operations before dispatch
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        if self._runs_here(args, result) and not function.is_view and packet.__name__ not in NO_LAUNCH:
            flop = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            self.tell(packet.__name__, describe(args, {}), flop)
        return result

    def _runs_here(self, args: tuple[Any, ...], result: Any) -> bool:
        tensors = (tensor for tensor in (result, *args) if isinstance(tensor, Tensor))
        return any(tensor.device.type == self.device for tensor in tensors)


def _flop(reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Count the floating-point operations of a call's matrix products, by running it on meta tensors."""
    counts: list[int] = []
    with _unheard(), _TorchOperations("meta", lambda name, shape, flop: counts.append(flop)):
        reference(*_without_memory(args), **_without_memory(kwargs))
    return sum(counts)


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, Quantised | Scaled):
        return value.on_meta()
    if isinstance(value, dict):
        return {key: _without_memory(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = map(_without_memory, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe a call: shapes of `args` with more than one dimension, then the keyword arguments that are set."""
    parts = []
    for value in args:
        if isinstance(value, tuple) and value and all(isinstance(item, Tensor) for item in value):
            parts.append(" + ".join(map(shape_text, value)))
        elif isinstance(value, Tensor) and value.ndim > 1:
            parts.append(shape_text(value))
        elif isinstance(value, Quantised | Scaled):
            parts.append(f"{shape_text(value.values)} in {NAMES[value.values.dtype]}")
    for name, value in kwargs.items():
        if value is True or isinstance(value, tuple | Tensor):
            parts.append(name)
        elif isinstance(value, int | str) and value:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def shape_text(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))

"""What a model runs on: each operation's kernel and why, launches, compiled variants, our share of the FLOPs.

    print(fastdiff.kernels.report(pipe, batch_size=8))

Operations, launches and `because` tell the recorder of this context, while one listens; without one they tell nobody.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = "torch."  # what the names of its operations begin with
# What neither computes nor copies, besides views.
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "set_", "_unsafe_view"}


@dataclass
class Call:
    """One call of an operation, or one of torch's own outside of any."""

    operation: str
    shape: str
    flop: int = 0  # of its matrix products, as its torch reference makes them
    kernels: list[str] = field(default_factory=list)  # that it launched, in order
    torch: list[str] = field(default_factory=list)  # operations of torch that it made
    why: str = ""


class Recorder:
    """The calls of a context, in the order in which they began."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.variants: set[str] = set()  # compiled kernels that were launched
        self.open: list[Call] = []  # calls that have not ended, the innermost last

    def launch(self, kernel, run: Callable[[], Any]) -> None:
        """`run` launches `kernel` and returns it compiled, or None in Triton's interpreter, which works by torch."""
        if not self.open:
            self.calls.append(Call("kernel", ""))
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
            self.calls.append(Call(f"{TORCH}{name}", shape, flop, torch=[name], why="not one of our operations"))

    @contextmanager
    def call(self, operation, args: tuple, kwargs: dict) -> Iterator[None]:
        call = Call(operation.__name__, _describe(args, kwargs), _flop(operation.reference, args, kwargs))
        if self.open:  # the reference of the operation that makes this call did its work too
            self.open[-1].flop -= call.flop
        self.calls.append(call)
        self.open.append(call)
        try:
            yield
        finally:
            self.open.pop()


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """The one that listens in this context."""
    return _recorder.get()


@contextmanager
def _unheard() -> Iterator[None]:
    token = _recorder.set(None)
    try:
        yield
    finally:
        _recorder.reset(token)


def because(reason: Callable[[], str]) -> None:
    """Say why the operation that is running runs as it does; `reason` is called where somebody listens."""
    listener = recorder()
    if listener is not None and listener.open:
        listener.open[-1].why = reason()


@contextmanager
def record(device: torch.device) -> Iterator[Recorder]:
    """Record what this context runs on the device inside the block; no CUDA graph is replayed there."""
    listener = Recorder()
    token = _recorder.set(listener)
    try:
        with _TorchOperations(device.type, listener.torch_operation):
            yield listener
    finally:
        _recorder.reset(token)


class _TorchOperations(TorchDispatchMode):
    """Calls tell(name, shape, flop) for each operation of torch on a device that computes or copies."""

    def __init__(self, device: str, tell: Callable[[str, str, int], None]):
        super().__init__()
        self.device, self.tell = device, tell

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        from torch.utils.flop_counter import flop_registry  # slow to import

        kwargs, packet = kwargs or {}, function._overloadpacket
        if packet not in flop_registry:
            with self:  # in inference mode torch does not take an operation apart before it gets here
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        if self._runs_here(args, result) and not function.is_view and packet.__name__ not in NO_LAUNCH:
            flop = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            self.tell(packet.__name__, _describe(args, {}), flop)
        return result

    def _runs_here(self, args: tuple, result: Any) -> bool:
        tensors = (tensor for tensor in (result, *args) if isinstance(tensor, Tensor))
        return any(tensor.device.type == self.device for tensor in tensors)


def _flop(reference: Callable, args: tuple, kwargs: dict) -> int:
    """Of the matrix products of a call, which is made on tensors without memory."""
    counts: list[int] = []
    with _unheard(), _TorchOperations("meta", lambda name, shape, flop: counts.append(flop)):
        reference(*_without_memory(args), **_without_memory(kwargs))
    return sum(counts)


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _without_memory(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = map(_without_memory, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _describe(args: tuple, kwargs: dict) -> str:
    """The shapes of the larger tensors among `args`, the other arguments that are plain, the names of given tensors."""
    parts = []
    for value in args:
        if isinstance(value, tuple) and value and all(isinstance(item, Tensor) for item in value):
            parts.append(" + ".join(map(_shape, value)))
        elif isinstance(value, Tensor) and value.ndim > 1:
            parts.append(_shape(value))
    for name, value in kwargs.items():
        if value is True or isinstance(value, tuple | Tensor):
            parts.append(name)
        elif isinstance(value, int | str) and value:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


@dataclass(frozen=True)
class Row:
    """Calls of an operation that were alike."""

    operation: str
    shape: str  # of its tensors, and its options
    count: int
    flop: int  # of one call's matrix products
    kernels: tuple[str, ...]  # launched by one call, in order
    torch: tuple[str, ...]  # operations of torch in one call
    why: str

    @property
    def runs_on(self) -> str:
        names = [*self.kernels, *(["torch"] * len(self.torch))]
        counts = ((name, names.count(name)) for name in dict.fromkeys(names))
        return " + ".join(name if count == 1 else f"{count} {name}" for name, count in counts)


@dataclass(frozen=True)
class Report:
    """What one step of a model runs on. An operation of torch counts as one launch."""

    what: str  # the model, its input, dtype and device
    rows: tuple[Row, ...]
    variants: int | None  # compiled kernels; None where nothing compiles them

    @property
    def launches(self) -> int:
        """Of our kernels and of torch's."""
        return self.kernel_launches + sum(row.count * len(row.torch) for row in self.rows)

    @property
    def kernel_launches(self) -> int:
        """Of our kernels."""
        return sum(row.count * len(row.kernels) for row in self.rows)

    @property
    def flop(self) -> int:
        """Of all convolutions and linear layers: of all matrix products, but those of attention."""
        return sum(row.count * row.flop for row in self.rows if row.operation != "attention")

    @property
    def share(self) -> float:
        """The fraction of `flop` that runs on our kernels."""
        on_torch = sum(row.count * row.flop for row in self.rows if row.operation != "attention" and not row.kernels)
        return 1 - on_torch / self.flop if self.flop else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The rows and the totals, for JSON."""
        totals = ("launches", "kernel_launches", "flop", "share")
        rows = [vars(row) | {"runs_on": row.runs_on} for row in self.rows]
        return vars(self) | {"rows": rows} | {name: getattr(self, name) for name in totals}

    def __str__(self) -> str:
        cells = [("operation", "tensors", "times", "GFLOP", "runs on", "why")]
        for row in self.rows:
            gflop = f"{row.count * row.flop / 1e9:.3g}" if row.flop else ""
            cells.append((row.operation, row.shape, str(row.count), gflop, row.runs_on, row.why))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        numbers = (2, 3)
        table = [
            "  ".join(
                cell.rjust(width) if i in numbers else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        compiled = "" if self.variants is None else f" in {self.variants} compiled variants"
        return "\n".join(
            [
                self.what,
                *table,
                f"{self.launches} launches: {self.kernel_launches} of our kernels{compiled}, "
                f"{self.launches - self.kernel_launches} of torch",
                f"{self.share:.1%} of {self.flop / 1e9:.4g} GFLOP of convolutions and linear layers on our kernels",
            ]
        )


def report(
    model: Any, *, batch_size: int = 1, height: int | None = None, width: int | None = None, **options
) -> Report:
    """What one step of `model` runs on, seen as it runs: without CUDA graphs, which change no kernel.

    Args:
        model: a Pipeline, for one denoising step; or a denoiser, for one prediction. What is made once for all steps,
            before their loop, is left out.
        height, width: of the pictures or latents; default: the model's sample_size.
        options: of a pipeline those of its `stream`; of a denoiser `class_labels` as its `conditioning` takes them,
            by default the first.

    Raises ValueError naming what the model cannot do.
    """
    run = _denoising_step if hasattr(model, "stream") else _prediction
    recorded, x = run(model, batch_size, height, width, **options)
    rows: dict[tuple, int] = {}
    for call in recorded.calls:
        key = call.operation, call.shape, call.flop, tuple(call.kernels), tuple(call.torch), call.why
        rows[key] = rows.get(key, 0) + 1
    order = sorted(dict.fromkeys(call.operation for call in recorded.calls), key=lambda name: name.startswith(TORCH))
    found = [Row(*key[:2], count, *key[2:]) for key, count in rows.items()]
    dtype = str(model.dtype).removeprefix("torch.")
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return Report(
        f"{type(model).__name__}, {_shape(x)}, {dtype}, {device}",
        tuple(sorted(found, key=lambda row: order.index(row.operation))),
        len(recorded.variants) or None,
    )


def _denoising_step(pipe, batch_size: int, height: int | None, width: int | None, **options) -> tuple[Recorder, Tensor]:
    size = {"batch_size": batch_size, "height": height, "width": width}
    steps = pipe.stream(**{"num_inference_steps": 3} | size | options)
    next(steps)  # and what comes before the loop
    with record(pipe.device) as recorded:
        step = next(steps)
    return recorded, step.x_t


def _prediction(
    model, batch_size: int, height: int | None, width: int | None, class_labels: Tensor | None = None
) -> tuple[Recorder, Tensor]:
    default = model.config.trained_size or (None, None)
    height, width = height or default[0], width or default[1]
    if height is None or width is None:
        raise ValueError("height, width: this model's config has no sample_size; give both")
    model.config.check_size(height, width)
    if class_labels is None and model.config.num_class_embeds is not None:
        class_labels = torch.zeros(batch_size, dtype=torch.int64, device=model.device)
    x = torch.randn(batch_size, height, width, model.config.in_channels, device=model.device, dtype=model.dtype)
    conditioning = model.conditioning(torch.ones(batch_size, device=model.device), class_labels)
    with record(model.device) as recorded:
        model.predict(x, conditioning)
    return recorded, x


class _CallableModule(ModuleType):
    """Makes `fastdiff.kernels.report(model)` a call of `report`: a namespace package has no file to export it from."""

    __call__ = staticmethod(report)


sys.modules[__name__].__class__ = _CallableModule

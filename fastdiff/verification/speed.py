"""`fastdiff bench`: time one forward of a model's denoiser, in fastdiff, in diffusers, and under torch.compile.

The peers are loaded one after the other, and each is called alone first: its seconds to the first result, its error
against diffusers in float32, and the GPU memory that it adds. Then groups of forwards take turns.
"""

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastdiff.checkpoints.loading import Load
from fastdiff.doctor import machine
from fastdiff.doctor.packages import version_of
from fastdiff.errors import InputError, in_one_line
from fastdiff.execution.devices import device_name, dtype_name, is_lost, naming_lost_device
from fastdiff.execution.memory import is_out_of_memory, or_explain
from fastdiff.kernels.plans.tuning import NO_TABLE, current
from fastdiff.requests.request import Request
from fastdiff.tuning.timing import measure
from fastdiff.verification.comparisons import import_verified
from fastdiff.verification.peers import (
    COMPILED,
    EAGER,
    FASTDIFF,
    Inputs,
    Subject,
    call_of,
    error_of,
    held_bytes,
    reserved_bytes,
)

SECONDS = 0.5  # about the length of a group of forwards
FORMAT = 1  # of the JSON document; a new number when a key changes its meaning
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

Call = Callable[[], Tensor]
Result = TypeVar("Result")


@dataclass
class Row:
    """The results of one peer. A result that was not measured is None, and `failure` says why if the peer failed."""

    name: str
    ms: float | None = None  # of one forward
    error: float | None = None  # the largest, as a fraction of the largest output of diffusers in float32
    first_result_s: float | None = None  # from the beginning of loading to the first output
    peak_bytes: int | None = None  # on a GPU
    failure: str | None = None


@dataclass
class Bench:
    """A comparison and its results, which grow during `run`."""

    subject: Subject
    how: Load
    size: tuple[int, int]  # height and width of a sample
    batch_size: int
    steps: int | None  # forwards in each group; None for about SECONDS
    with_compile: bool
    device: str  # its name
    facts: Mapping[str, Any]  # about the machine, as `fastdiff doctor` names them
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights_hash: str | None = None
    is_complete: bool = False

    @classmethod
    def prepare(
        cls, request: Request, device: str, *, batch_size: int = 1, steps: int | None = None, with_compile: bool = True
    ) -> "Bench":
        """Find the model and check all options. Raises InputError if one cannot be used."""
        how = Load.of(device=device, dtype=request.dtype, variant=request.variant, precision=request.precision)
        subject = Subject.find(request)
        size = subject.size(request.height, request.width)
        found = machine.findings(machine.Machine.look())
        facts = {name: value for finding in found for name, value in finding.values.items()}
        table = current(how.device)
        notes = [] if table is NO_TABLE else [f"tiles by {table.source}"]
        return cls(subject, how, size, batch_size, steps, with_compile, device_name(how.device), facts, notes=notes)

    def run(self) -> None:
        """Measure everything. A peer that fails gets a row with the reason, and the others are measured.

        Raises:
            InputError: fastdiff cannot load the model.
            OutOfMemoryError: the inputs do not fit in memory.
            DeviceLostError: the GPU fails. The rows keep what was measured before.
        """
        hashing = self.subject.begin_hash(self.how.variant)
        diffusers = self._diffusers()
        names = [FASTDIFF, *([EAGER] if diffusers else []), *([COMPILED] if diffusers and self.with_compile else [])]
        with self._surroundings(names), naming_lost_device():
            given, problem = partial(self.subject.inputs, self.batch_size, self.size, self.how.device), self._too_large
            inputs = or_explain(given, problem)
            expected = None if diffusers is None else self._expected(inputs, diffusers)
            self.weights_hash = _digits(hashing)
            calls: dict[str, Call] = {}
            for name in names:
                self.rows.append(Row(name))
                call = self._tried(self.rows[-1], partial(self._first, self.rows[-1], inputs, expected, diffusers))
                calls |= {} if call is None else {name: call}
            self._in_turns(calls)
        self.is_complete = True

    def _diffusers(self) -> ModuleType | None:
        """Return diffusers. Note how to get it if it is not installed."""
        try:
            return import_verified("the comparison with diffusers")
        except InputError as error:
            self.notes.append(str(error))
            return None

    def _expected(self, inputs: Inputs, diffusers: ModuleType) -> Tensor | None:
        """Return diffusers' output in float32. Note why there is none if it fails."""
        row = Row("")
        expected = self._tried(row, partial(self.subject.exact, inputs, diffusers, self.how))
        if expected is None:
            self.notes.append(f"no errors: diffusers in float32 failed ({row.failure})")
        return expected

    def _first(self, row: Row, inputs: Inputs, expected: Tensor | None, diffusers: ModuleType | None) -> Call:
        """Load a peer, call it alone, and put the results into its row."""
        on_gpu = self.how.device.type == "cuda"
        before = reserved_bytes() if on_gpu else 0
        start = time.perf_counter()
        call = call_of(self.subject.build(row.name, self.how, diffusers), inputs)
        output = call()
        if on_gpu:
            torch.cuda.synchronize()
        row.first_result_s = time.perf_counter() - start
        row.error = None if expected is None else error_of(output, expected)
        del output
        row.peak_bytes = held_bytes(call) - before if on_gpu else None
        return call

    def _in_turns(self, calls: dict[str, Call]) -> None:
        """Time the calls in turns. If one fails, start again without it."""
        rows = {row.name: row for row in self.rows}

        def tell(times: dict[str, float]) -> None:
            for name, milliseconds in times.items():
                rows[name].ms = milliseconds

        while calls:
            running: list[str] = []  # the name of the last call
            watched = {name: partial(_noting, running, name, call) for name, call in calls.items()}
            options: Any = {"graph": False, "seconds": SECONDS, "count": self.steps, "device": self.how.device}
            blame = Row("")
            if self._tried(blame, partial(measure, watched, tell=tell, **options)) is not None:
                return
            rows[running[-1]].ms, rows[running[-1]].failure = None, blame.failure
            del calls[running[-1]], watched

    def _tried(self, row: Row, function: Callable[[], Result]) -> Result | None:
        """Return the result of `function`. If it fails, free its memory, put the reason into the row and return None.

        A model that fastdiff cannot load and a lost GPU are errors of the whole comparison.
        """
        try:
            return function()
        except Exception as error:
            no_memory = is_out_of_memory(error)
            if is_lost(error) or (row.name == FASTDIFF and not no_memory):
                raise
            reason = str(error) if isinstance(error, InputError) else in_one_line(error)
            row.failure = self._too_large if no_memory else reason
        gc.collect()
        torch.cuda.empty_cache()
        return None

    @property
    def _too_large(self) -> str:
        return f"out of memory for batch size {self.batch_size}"

    @contextlib.contextmanager
    def _surroundings(self, names: list[str]) -> Iterator[None]:
        """Let cuDNN choose its fastest algorithms, without TF32. Kernels and compiled code start with empty caches."""
        device, cudnn = self.how.device, torch.backends.cudnn
        before = cudnn.benchmark, cudnn.allow_tf32
        with contextlib.ExitStack() as stack:
            stack.callback(_set_cudnn, *before)
            _set_cudnn(benchmark=True, allow_tf32=False)
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            if device.type == "cuda" or COMPILED in names:
                stack.enter_context(_empty_caches())
            yield

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values: what was measured so far, of what, and where."""
        height, width = (side * self.subject.scale for side in self.size)
        of_trajectories = self.subject.config.of_trajectories
        facts = dict(self.facts)
        versions = {"fastdiff": facts.pop("version"), "python": facts.pop("python"), "torch": facts.pop("torch")}
        return {
            "format": FORMAT,
            "complete": self.is_complete,
            "model": self.subject.name,
            "class": self.subject.part.class_name,
            "weights_sha256": self.weights_hash,
            "batch_size": self.batch_size,
            "height": None if of_trajectories else height,
            "width": None if of_trajectories else width,
            "horizon": self.size[1] if of_trajectories else None,
            "dtype": dtype_name(self.how.dtype),
            "precision": self.how.precision,
            "device": self.device,
            "threads": torch.get_num_threads(),
            "steps": self.steps,
            "versions": versions | {"triton": facts.pop("triton"), "diffusers": version_of("diffusers")},
            "machine": facts,
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }


def _noting(running: list[str], name: str, call: Call) -> Tensor:
    running[:] = [name]
    return call()


def _digits(hashing: "Future[str]") -> str | None:
    """Return the hash of the weights; None if their files cannot be read, which loading explains."""
    try:
        return hashing.result()
    except OSError:
        return None


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """Give Triton and torch.compile empty caches for a block: first results do not depend on earlier runs."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="fastdiff-bench-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: os.path.join(folder, name.lower()) for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})


def _set_cudnn(benchmark: bool, allow_tf32: bool) -> None:
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = allow_tf32

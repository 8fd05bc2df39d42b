"""The tiles, warps and stages that are fastest on the card at hand, as a table that fastdiff reads.

    python benchmarks/tune.py [WORKLOAD ...] [--model FOLDER [--batch-size N]] [--save [DIR]]

Runs a forward of each workload (those of `bench_models.py`; all where none is named), or of a model of yours, and then
every kernel that asks for a table there on each shape that it met: with the usual choice, which must hold against torch
in a wider dtype, and with all candidates, which must give its bits in every repeat, with memory poisoned before. The
fastest goes into the table where it gains 3 % or more, in a second measurement too. The table is kept shape by shape,
with what it had of others, in `$FASTDIFF_TABLES` or `~/.cache/fastdiff/tables` (`kernels.plans.tuning`). `--save` keeps
the measurements.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from forwards import WORKLOADS, ours
from harness import DEVICE, PARSER, chosen, command_line, machine, measure, needs_gpu, report, widened
from torch import Tensor

import fastdiff
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.host.recording import Recorder, record
from fastdiff.kernels.plans.tuning import NO_TABLE, Choices, Table, file_name, read_table, user_folder, using

REPEATS = 5  # a race shows as bits that move
GAIN = 0.97  # of the usual time, that a choice may take to be worth an entry


class Shape(NamedTuple):
    """A shape of an operation, one call of it, and what may be chosen for it."""

    operation: str
    name: str
    candidates: list[tuple]  # the usual one first
    run: Callable[[], Any]
    reference: Callable[..., Any]  # of the arguments, in any dtype
    arguments: tuple[tuple, dict[str, Any]]

    def choosing(self, candidate: tuple) -> Any:
        """Have the operation take a candidate."""
        return using(Table("one candidate", {self.operation: {self.name: list(candidate)}}))


class Asked(Recorder):
    """A table that chooses nothing, and keeps the call that first asked it for a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[tuple] = []  # of calls that have not ended, the innermost last
        self.shapes: dict[tuple[str, str], Shape] = {}

    @contextmanager
    def call(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        self.arguments.append((operation, args, kwargs))
        with super().call(operation, args, kwargs):
            yield
        self.arguments.pop()

    def choose(self, operation: str, name: str, usual: Any, candidates: Callable) -> Any:
        if (operation, name) not in self.shapes:
            called, args, kwargs = self.arguments[-1]
            each = list(dict.fromkeys([usual, *candidates()]))
            run = partial(called, *args, **kwargs)
            self.shapes[operation, name] = Shape(operation, name, each, run, called.reference, (args, kwargs))
        return usual


def main() -> None:
    PARSER.add_argument("--model", metavar="FOLDER", help="a model of yours instead: a folder, or a bundled name")
    PARSER.add_argument("--batch-size", type=int, default=1, metavar="N", help="its pictures; 1")
    needs_gpu()
    torch.backends.cudnn.allow_tf32 = False  # of what candidates are held against
    asked = command_line()
    forwards = {name: partial(ours, name) for name in chosen(WORKLOADS)}
    if asked.model:
        forwards = {asked.model: partial(own_model, asked.model, asked.batch_size)}
    wrong: list[str] = []
    report("tune", (row for name, make in forwards.items() for row in rows(name, make, wrong)))
    if wrong:
        sys.exit("\n".join(["not tuned:", *wrong]))


def own_model(folder: str, batch_size: int) -> Callable[[], Any]:
    """A drawing of a folder's pipeline, in two steps."""
    pipe = fastdiff.Pipeline.from_pretrained(folder, device=DEVICE)
    prompt = {"prompt": ""} if pipe.reads_text else {}
    return partial(pipe, num_inference_steps=2, batch_size=batch_size, **prompt)


def rows(workload: str, make: Callable[[], Callable[[], Any]], wrong: list[str]) -> Iterator[dict[str, Any]]:
    """Tune all shapes of a forward, and keep what was chosen; those that cannot be proven are said in `wrong`."""
    with torch.inference_mode():
        shapes = shapes_of(make())
        compile_candidates(shapes)
        for shape in shapes:
            try:
                row = tune(shape)
            except (ArithmeticError, torch.OutOfMemoryError) as error:
                wrong.append(f"{shape.operation} {shape.name}: {error}")
                continue
            keep(shape, row)
            yield {"workload": workload} | row


def shapes_of(forward: Callable[[], Any]) -> list[Shape]:
    """The shapes that ask for a table in a forward."""
    asked = Asked()
    with using(asked), record(DEVICE, asked):
        forward()
    return list(asked.shapes.values())


def compile_candidates(shapes: list[Shape]) -> None:
    """Compile the kernels of all candidates side by side; one that does not compile is an error when it is tried."""
    with only_compiling():
        for shape in shapes:
            for candidate in shape.candidates:
                with shape.choosing(candidate), suppress(Exception):
                    shape.run()


def tune(shape: Shape) -> dict[str, Any]:
    """Prove and time the candidates of a shape: a row of the results, of which `choice` is None for the usual."""
    expected = proven(shape)
    refused = {candidate: why for candidate in shape.candidates[1:] if (why := fault(shape, candidate, expected))}
    sound = [candidate for candidate in shape.candidates if candidate not in refused]
    times = timed(shape, sound)
    best = min(sound, key=times.__getitem__)
    if best != shape.candidates[0]:
        times = timed(shape, [shape.candidates[0], best], seconds=0.05)
    usual_ms, best_ms = times[shape.candidates[0]], times[best]
    return {
        "operation": shape.operation,
        "shape": shape.name,
        "usual_ms": usual_ms,
        "best_ms": best_ms,
        "usual": list(shape.candidates[0]),
        "choice": list(best) if best_ms <= GAIN * usual_ms else None,
        "candidates": len(shape.candidates),
        "refused": {str(list(candidate)): why for candidate, why in refused.items()},
    }


def timed(shape: Shape, candidates: list[tuple], seconds: float = 0.01) -> dict[tuple, float]:
    """Milliseconds of each candidate, by turns."""

    def call(candidate: tuple) -> Any:
        with shape.choosing(candidate):
            return shape.run()

    times = measure({str(candidate): partial(call, candidate) for candidate in candidates}, seconds=seconds)
    return {candidate: times[str(candidate)] for candidate in candidates}


def proven(shape: Shape) -> list[Tensor]:
    """The outputs of the usual choice, as far from the truth in every repeat as torch at most, twice, and an ulp.

    Raises ArithmeticError where they are not: then nothing that has the same bits is right.
    """
    args, options = shape.arguments
    eager = tensors(shape.reference(*args, **options))[0]
    wide = torch.float64 if eager.dtype == torch.float32 else torch.float32
    truth = tensors(shape.reference(*widened(args, wide), **{k: widened(v, wide) for k, v in options.items()}))[0]
    allowed = 2 * (eager - truth).abs().max() + torch.finfo(eager.dtype).eps * truth.abs().max()
    for _ in range(REPEATS):
        outputs = poisoned(shape, shape.candidates[0])
        error = (outputs[0] - truth).abs().max()
        if not error <= allowed:
            raise ArithmeticError(f"the usual choice is off by {error:.3g}, allowed are {allowed:.3g}")
    return outputs


def fault(shape: Shape, candidate: tuple, expected: list[Tensor]) -> str | None:
    """Why a candidate must not be chosen, if it must not: it fails, or has other bits in any of some repeats."""
    for _ in range(REPEATS):
        try:
            outputs = poisoned(shape, candidate)
            torch.cuda.synchronize() if DEVICE.type == "cuda" else None
        except Exception as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not all(map(torch.equal, outputs, expected)):
            return "other bits"
    return None


def poisoned(shape: Shape, candidate: tuple) -> list[Tensor]:
    """The outputs of a candidate, NaN where it writes nothing."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory
    try:
        with shape.choosing(candidate):
            return tensors(shape.run())
    finally:
        torch.use_deterministic_algorithms(False)


def tensors(output: Any) -> list[Tensor]:
    """All tensors of an output."""
    if isinstance(output, tuple):
        return [tensor for part in output for tensor in tensors(part)]
    return [output] if isinstance(output, Tensor) else []


def keep(shape: Shape, row: dict[str, Any]) -> None:
    """Write the choice for a shape into the user's table of this card, or take out an older one."""
    where = machine()
    file = user_folder() / file_name(where["gpu"])
    choices: dict[str, dict[str, list]] = {name: dict(shapes) for name, shapes in known(file).items()}
    of_operation = choices.setdefault(shape.operation, {})
    of_operation.pop(shape.name, None)
    if row["choice"] is not None:
        of_operation[shape.name] = row["choice"]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}.tmp")
    new.write_text(json.dumps(where | {"triton": triton.__version__, "choices": choices}, indent=1) + "\n")
    new.replace(file)


def known(file: Any) -> Choices:
    """The choices of the table in a file, if it is one of this Triton."""
    return read_table(file).choices if file.is_file() else NO_TABLE.choices


if __name__ == "__main__":
    main()

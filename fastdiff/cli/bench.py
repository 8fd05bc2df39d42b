"""`fastdiff bench`: time a model's denoiser on this machine, in fastdiff and in diffusers."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.cli.arguments import add_config_argument, add_model_arguments, count
from fastdiff.cli.interruption import CTRL_C
from fastdiff.cli.streams import printable, require_stdout, say
from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.kinds import Pictures, TrainSteps
from fastdiff.requests import defaults
from fastdiff.requests.request import DTYPES, PRECISIONS, Request
from fastdiff.runs import files
from fastdiff.schema import checked

if TYPE_CHECKING:
    from fastdiff.verification.speed import Bench

STDOUT = "-"
LEGEND = "error: largest difference from diffusers in float32, as a fraction of its largest output"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_model_arguments(parser, "model", note="", of_files=add_config_argument)
    add("--dtype", choices=DTYPES, help=f"model dtype; auto: bfloat16 on GPU, else float32 (default: {defaults.DTYPE})")
    precision = f"weight precision of fastdiff's model; diffusers' stays full (default: {defaults.PRECISION})"
    add("--precision", choices=PRECISIONS, help=precision)
    add = parser.add_argument_group("forward").add_argument
    add("-b", "--batch-size", type=count, default=1, metavar="N", help="pictures or trajectories (default: 1)")
    for side in ("height", "width"):
        add(f"--{side}", type=int, metavar="PIXELS", help="of the pictures (default: the model's training size)")
    add = parser.add_argument_group("measurement").add_argument
    steps = "forwards in each of 5 turns, whose median is the time (default: half a second of them)"
    add("--steps", type=count, metavar="N", help=steps)
    add("--no-compile", action="store_true", help="leave out diffusers under torch.compile, which takes minutes")
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help=f"write one JSON object to FILE; {STDOUT} prints it instead of the table")
    parser.epilog = (
        "Without the package diffusers, only fastdiff is measured. Ctrl-C keeps what was measured so far. "
        "Exit codes: 0 fastdiff was measured; 1 it was not; 2 the input cannot be used."
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON. Return 0 if fastdiff was measured, else 1. InputError for unusable input."""
    require_stdout()
    request = Request.from_flags(vars(args))
    checked("batch-size", args.batch_size, Pictures)
    checked("steps", args.steps, TrainSteps | None)
    if args.json not in (None, STDOUT):
        _check_file(Path(args.json))
    from fastdiff.verification.speed import Bench

    bench = Bench.prepare(
        request, args.device, batch_size=args.batch_size, steps=args.steps, with_compile=not args.no_compile
    )
    CTRL_C.describe = lambda: _interrupted(bench, args.json)
    try:
        bench.run()
    finally:
        CTRL_C.describe = lambda: "fastdiff: interrupted"
        if bench.rows:
            print(_written(bench, args.json))
    (ours,) = [row for row in bench.rows if row.name == "fastdiff"]
    if ours.failure is not None:
        say(f"error: fastdiff was not measured: {ours.failure}; lower --batch-size, --height or --width")
    return int(ours.failure is not None)


def _check_file(path: Path) -> None:
    """Raise InputError unless `path` is free, or holds an earlier result."""
    files.check([path], "--json")
    try:
        is_result = not path.exists() or {"format", "rows"} <= json.loads(path.read_bytes()).keys()
    except (OSError, ValueError, AttributeError):
        is_result = False
    if not is_result:
        raise InputError(f"{path} exists and is no result of bench; choose another file with --json")


def _interrupted(bench: "Bench", file: str | None) -> str:
    """Show what was measured so far, and return the line that says so. Called in the handler of Ctrl-C."""
    if bench.rows:
        os.write(1, f"{_written(bench, file)}\n".encode(errors="backslashreplace"))
    return "fastdiff: interrupted; the results so far are kept" if bench.rows else "fastdiff: interrupted"


def _written(bench: "Bench", file: str | None) -> str:
    """Write the file, and return the text for stdout."""
    found = bench.as_dict()
    if file == STDOUT:
        return json.dumps(found)
    if file is not None:
        _write(Path(file), json.dumps(found, indent=1) + "\n")
    return _as_table(found)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(path.parent, text.encode()) as temporary:
            os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}); choose another file with --json") from error


def _as_table(found: Mapping[str, Any]) -> str:
    """Return the results as lines of text."""
    sides = [found[side] for side in ("width", "height")]
    size = f"horizon {found['horizon']}" if found["horizon"] is not None else "{} x {}".format(*sides)
    precision = "" if found["precision"] == defaults.PRECISION else f", {found['precision']} weights in fastdiff"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    lines = [
        f"one forward of {found['model']} ({found['class']}), batch size {found['batch_size']}, {size}",
        f"{found['dtype']}{precision}, on {found['device']}; {versions}",
        f"{'':<16}{'ms':>10}{'speed':>8}{'error':>10}{'first result':>14}{'peak memory':>13}",
        *(_line(row, found["rows"]) for row in found["rows"]),
        *found["notes"],
        LEGEND,
    ]
    return "\n".join(map(printable, lines))


def _line(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the line of a row. Its speed is relative to diffusers."""
    if row["failure"] is not None:
        return f"{row['name']:<16}{'failed: ':>10}{row['failure']}"
    eager = next((each["ms"] for each in rows if each["name"] == "diffusers"), None)
    cells = [
        (row["ms"], 10, "{:.2f}"),
        (eager and row["ms"] and eager / row["ms"], 8, "{:.2f}x"),
        (row["error"], 10, "{:.1e}"),
        (row["first_result_s"], 14, "{:.1f} s"),
        (row["peak_bytes"] and row["peak_bytes"] / 2**30, 13, "{:.2f} GiB"),
    ]
    return f"{row['name']:<16}" + "".join(
        ("-" if value is None else form.format(value)).rjust(width) for value, width, form in cells
    )

"""Compare the working tree's times with another commit's: the option `--base REV` of some benchmarks.

Each side is a separate process that runs PROGRAM: this tree's benchmarks over that side's fastdiff, whatever the layout
of the other commit. It times a forward, or the operation of a benchmark module. Only one side runs at a time.
"""

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastdiff
from benchmarks.harness.checkouts import ROOT, checkout
from benchmarks.harness.reports import PARSER, chosen, command_line, report
from fastdiff.tuning.timing import DEVICE, GROUPS, Call, capture, seconds_each

LOSS = 1.03  # a larger ratio to the base's time is a loss
FINE = "equal or faster"
SECONDS = 0.05  # for a group of calls
FORWARDS = "benchmarks.models.forwards"
# Imports fastdiff from the current folder, but the benchmarks and `fastdiff.tuning` (workloads, timing) from this tree.
PROGRAM = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

import fastdiff

root = sys.argv.pop(1)
sys.path.insert(0, root)
folder = f"{root}/fastdiff/tuning"
spec = spec_from_file_location("fastdiff.tuning", f"{folder}/__init__.py", submodule_search_locations=[folder])
sys.modules["fastdiff.tuning"] = module_from_spec(spec)

from benchmarks.harness.base import main

main()
"""


def compare_if_asked(module: str, names: Iterable[str]) -> None:
    """If the command line has `--base REV`, compare the workloads and exit: with 1 on a loss."""
    PARSER.add_argument(
        "--base", metavar="REV", help="compare with a commit or a checkout's folder; exit with 1 on a loss of 3 %%"
    )
    if command_line().base:
        sys.exit(compare(module, chosen(names), command_line().base))


def compare(module: str, names: list[str], rev: str) -> int:
    """Print and save the times of both sides, and return the exit code."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        try:
            base = stack.enter_context(checkout(rev, Path(folder, "base")))
        except (LookupError, OSError) as error:
            print(f"--base {rev} is neither a folder of a checkout nor a commit; git says: {error}", file=sys.stderr)
            return 2
        report("base", (rows.append(row) or row for row in (compared(module, name, base) for name in names)))
    lost = [row["workload"] for row in rows if row["verdict"] != FINE]
    said = f"slower than {rev}, or not measured: {', '.join(lost)}" if lost else f"nothing is slower than {rev}"
    print(said, file=sys.stderr)
    return int(bool(lost))


def compared(module: str, name: str, base: Path) -> dict[str, Any]:
    """Return a row with both sides' milliseconds. A loss is measured twice, since other processes can cause one."""
    row: dict[str, Any] = {"workload": name, "base_ms": None, "fastdiff_ms": None, "ratio": None}
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(side(root, module, name)) for root in (base, ROOT)]
        try:
            for process in sides:
                answer(process)  # wait until it is ready
            for _ in range(2):
                times = in_turns(*sides)
                row |= {"base_ms": times[0], "fastdiff_ms": times[1], "ratio": times[1] / times[0]}
                if row["ratio"] <= LOSS:
                    return row | {"verdict": FINE}
        except (json.JSONDecodeError, BrokenPipeError):  # the process has ended
            return row | {"verdict": "a side failed"}
    return row | {"verdict": "LOSS"}


def in_turns(*sides: subprocess.Popen) -> list[float]:
    """Return each side's median milliseconds of a call. The sides take turns, and alternate which goes first."""
    groups: list[dict[int, float]] = []
    for turn in range(2 * GROUPS):
        order = list(range(len(sides)))[:: 1 if turn % 2 else -1]
        groups.append({i: answer(sides[i]) for i in order})
    return [statistics.median(group[i] for group in groups) for i in range(len(sides))]


def answer(process: subprocess.Popen) -> float:
    """Let the process time its next group, and return the milliseconds of a call."""
    assert process.stdin and process.stdout  # pipes
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@contextlib.contextmanager
def side(root: Path, module: str, name: str) -> Iterator[subprocess.Popen]:
    """Start a process that times a workload with the code of `root` on request; kill it afterwards."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", PROGRAM, str(ROOT), module, name]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": path}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def call_of(module: str, name: str) -> Call:
    """Return our call of a workload: the module's `ours`, or the operation of `bench_<x>` on its `arguments`."""
    benchmark = importlib.import_module(module)
    if hasattr(benchmark, "ours"):
        return benchmark.ours(name)
    args, options = benchmark.arguments(name)
    return partial(getattr(benchmark, module.rpartition("bench_")[2]), *args, **options)


@torch.inference_mode()
def main() -> None:
    """Time a group of calls for each line of standard input."""
    package = Path(fastdiff.__file__).parent
    assert package.parent.samefile(Path.cwd()), f"{package} is not the fastdiff of {Path.cwd()}"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print to standard output, which carries the answers
    module, name = sys.argv[1:]
    call = call_of(module, name)
    for _ in range(3):
        call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        call = call if module == FORWARDS else capture(call)  # a model captures its own graphs
    count = max(1, round(SECONDS / seconds_each(call, 1)))
    for _ in sys.stdin:
        print(1e3 * seconds_each(call, count), file=answers)

"""The command line and the reports of all benchmarks.

`python benchmarks/kernels/bench_<x>.py` prints each row when it has it, for people, and as the last line one JSON
document, which `--save` also writes to benchmarks/results/<x>.json (`--save DIR`: there).
"""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fastdiff.tuning.timing import DEVICE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COLUMN, WORKLOAD = 11, 36  # characters of a printed number, and of a workload's name

PARSER = argparse.ArgumentParser()
PARSER.add_argument("workload", nargs="*", help="the ones to measure, where a benchmark lets one choose")
PARSER.add_argument("--save", nargs="?", const=str(RESULTS), metavar="DIR", help="write the results to a file")


def environment() -> dict[str, str]:
    """The variables of processes that a benchmark starts, which find fastdiff and benchmarks as they are here."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def needs_gpu() -> None:
    """End a benchmark of kernels where there is no GPU."""
    if DEVICE.type != "cuda":
        print("this benchmark needs a GPU: elsewhere every operation is its torch reference")
        raise SystemExit


def report(name: str, rows: Iterable[dict[str, Any]], *, by: tuple[str, ...] = ()) -> None:
    """Print each row when it is there, in the end all as JSON with their machine; save where the command line asks.

    Rows are saved one by one: what was measured is kept, whatever becomes of the rest.

    by: where there are such keys, a new row replaces the saved one that has the same values, and no other.
    """
    done: list[dict[str, Any]] = []
    columns: list[str] = []
    folder, where = save_folder(), machine()
    saved = read_rows(Path(folder, f"{name}.json")) if by and folder is not None else []
    for row in rows:
        new = [key for key in row if key not in columns]
        if new:
            columns += new
            print(_line({key: key for key in columns}, columns), flush=True)
        print(_line(row, columns), flush=True)
        done.append(row | where)
        if folder is not None:
            new_ones = {tuple(map(each.get, by)) for each in done}
            kept = [each for each in saved if tuple(map(each.get, by)) not in new_ones]
            Path(folder, f"{name}.json").write_text(json.dumps(kept + done) + "\n")
    print(json.dumps(done))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a saved report; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def _line(row: dict[str, Any], columns: list[str]) -> str:
    """The row's cells under the columns' names, blank where it has none."""
    widths = {key: WORKLOAD if key == "workload" else max(COLUMN, len(key)) for key in columns}
    return "  ".join(_cell(row.get(key)).rjust(width) for key, width in widths.items())


def machine() -> dict[str, str]:
    """Everything that a number depends on: GPU, versions, and the commit of the code."""
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"none ({platform.machine()} CPU)"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
    versions = {name: _version(name) for name in ("torch", "triton", "diffusers")}
    return {"gpu": gpu, **versions, "commit": git.stdout.strip() or "unknown"}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def chosen(workloads: Iterable[str]) -> list[str]:
    """The workloads that the command line names, or all of them."""
    known = list(workloads)
    named = command_line().workload
    for name in named:
        if name not in known:
            raise SystemExit(f"no workload {name!r}; there are {', '.join(known)}")
    return named or known


def save_folder() -> str | None:
    """Where the command line asks for the results, if it does."""
    return command_line().save


def command_line() -> argparse.Namespace:
    """Return what the command line asks for: workloads, where to save, and what a benchmark added to PARSER."""
    return PARSER.parse_args()

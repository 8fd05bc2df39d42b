"""The command line and the reports of all benchmarks.

`python benchmarks/kernels/bench_<x>.py` prints one row after the other for people, and one JSON document as its last
line. `--save` also writes that document to benchmarks/results/<x>.json, and `--save DIR` writes it to that folder.
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

from benchmarks.harness.code import code_hash
from fastdiff.tuning.timing import DEVICE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COLUMN, WORKLOAD = 11, 36  # width of a printed number and of a workload's name

PARSER = argparse.ArgumentParser()
PARSER.add_argument("workload", nargs="*", help="workloads to measure (default: all)")
PARSER.add_argument("--save", nargs="?", const=str(RESULTS), metavar="DIR", help="write the results to a file")


def environment() -> dict[str, str]:
    """Return environment variables with which a child process imports this checkout's fastdiff and benchmarks."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def needs_gpu() -> None:
    """Exit if the machine has no GPU."""
    if DEVICE.type != "cuda":
        print("this benchmark needs a GPU: on a CPU every operation runs its torch reference")
        raise SystemExit


def report(name: str, rows: Iterable[dict[str, Any]], *, by: tuple[str, ...] = ()) -> None:
    """Print each row as soon as it is measured, then all rows as JSON with their machine, versions and code.

    `--save` writes the file again after each row, so an interrupted benchmark keeps what it measured.

    by: keys that identify a row. A new row replaces the saved row with the same values, and other saved rows stay.
        Without keys the new rows replace the file.
    """
    done: list[dict[str, Any]] = []
    columns: list[str] = []
    folder, where = save_folder(), machine()
    code = code_hash(name)
    if code is not None:
        where["code"] = code
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
    """Return the rows of a saved report, or an empty list if the file does not exist."""
    return json.loads(path.read_text()) if path.exists() else []


def _line(row: dict[str, Any], columns: list[str]) -> str:
    """Return the row's cells, aligned under the names of the columns; a missing cell is blank."""
    widths = {key: WORKLOAD if key == "workload" else max(COLUMN, len(key)) for key in columns}
    return "  ".join(_cell(row.get(key)).rjust(width) for key, width in widths.items())


def machine() -> dict[str, str]:
    """Return what a number depends on: GPU, versions, and the commit of the code."""
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
    """Return the workloads that the command line names, or all of them."""
    known = list(workloads)
    named = command_line().workload
    for name in named:
        if name not in known:
            raise SystemExit(f"no workload {name!r}; there are {', '.join(known)}")
    return named or known


def save_folder() -> str | None:
    """Return the folder of `--save`, or None."""
    return command_line().save


def command_line() -> argparse.Namespace:
    """Return what the command line asks for: workloads, where to save, and what a benchmark added to PARSER."""
    return PARSER.parse_args()

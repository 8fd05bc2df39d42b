"""`fastdiff tune`: find the fastest tiles, warps and stages for this GPU and save them in a table."""

import argparse
import json
from typing import Any

from fastdiff.arguments import shown
from fastdiff.cli.arguments import count
from fastdiff.cli.streams import printable, require_stdout, say
from fastdiff.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = "model and batch size, such as sd15_b2 (default: all; an unknown name lists them)"
    add("workload", nargs="*", default=(), metavar="WORKLOAD", help=names)
    add("--model", metavar="MODEL", help="tune this model instead: bundled name, diffusers folder, file or hub id")
    add("--batch-size", type=count, default=1, metavar="N", help="batch size for --model (default: 1)")
    add("--json", action="store_true", help="print one JSON object per row")
    parser.epilog = (
        "A choice is saved if it gives the same bits as the default and takes at most 97 percent of its time. Tables "
        "are in $FASTDIFF_TABLES (default: ~/.cache/fastdiff/tables) and do not change the pictures. "
        "Exit codes: 0 every shape was tuned; 1 some shapes failed; 2 there is no GPU, or the workload is unknown."
    )


def run(args: argparse.Namespace) -> int:
    """Print a row for each shape. Return 0 if all could be proven, else 1. InputError without a GPU."""
    require_stdout()
    from fastdiff.tuning.models import WORKLOADS

    unknown = next((name for name in args.workload if name not in WORKLOADS), None)
    if unknown is not None:
        raise InputError(f"unknown WORKLOAD {shown(unknown)}; use {', '.join(WORKLOADS)}")
    if args.workload and args.model is not None:
        raise InputError("--model and WORKLOAD exclude each other; give only one")
    from fastdiff.tuning import tables, tuner

    card = tuner.find_card()
    if args.model is None:
        forwards = tuner.of_workloads(args.workload or list(WORKLOADS))
    else:
        forwards = tuner.of_model(args.model, args.batch_size)
    wrong: list[str] = []
    for row in tuner.rows(forwards, card, wrong):
        print(json.dumps(row) if args.json else printable(_line(row)), flush=True)
    if wrong:
        say("\n".join(["not tuned:", *map(printable, wrong)]))
        return 1
    if not args.json:
        print(printable(f"saved in {tables.table_of(card)}"))
    return 0


def _line(row: dict[str, Any]) -> str:
    """Return a row as text: the shape, its times and the choice."""
    choice = "default kept" if row["choice"] is None else f"{row['choice']} instead of {row['usual']}"
    refused = f", {len(row['refused'])} of {row['candidates']} refused" if row["refused"] else ""
    times = f"{1e3 * row['usual_ms']:.1f} us, best {1e3 * row['best_ms']:.1f} us"
    return f"{row['workload']}  {row['operation']} {row['shape']}: {times}; {choice}{refused}"

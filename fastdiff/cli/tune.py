"""`fastdiff tune`: find the fastest tiles, warps and stages for this GPU and save them in a table."""

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from fastdiff.arguments import shown
from fastdiff.cli.arguments import add_file_arguments, batches, sizes
from fastdiff.cli.interruption import CTRL_C
from fastdiff.cli.streams import printable, require_stdout, say
from fastdiff.errors import InputError
from fastdiff.requests import defaults
from fastdiff.requests.request import DTYPES, PRECISIONS, Request

if TYPE_CHECKING:
    from fastdiff.tuning.tuner import Make

OF_MODEL = ("size", "control", "config", "vae", "prediction_type", "revision", "dtype", "precision")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = "model and batch size, such as sd15_b2 (default: all; an unknown name lists them)"
    add("workload", nargs="*", default=(), metavar="WORKLOAD", help=names)
    time = "begin no measurement after N minutes (default: no limit); the next run goes on"
    add("--minutes", type=_minutes, metavar="N", help=time)
    add("--json", action="store_true", help="print one JSON object per row")
    add = parser.add_argument_group("a model of yours, instead of WORKLOAD").add_argument
    add("-m", "--model", metavar="MODEL", help="bundled name, diffusers folder, file or hub id")
    add_file_arguments(add)
    add("--revision", help="branch, tag or commit of a hub model")
    add("--size", type=sizes, metavar="WxH,...", help="sizes in pixels (default: the training size)")
    add("-b", "--batch-size", type=batches, default=(1,), metavar="N,...", help="pictures at once (default: 1)")
    add("--control", action="append", metavar="NAME", help="also a ControlNet: folder, file, name or hub id[:PLACE]")
    add("--dtype", choices=DTYPES, help=f"model dtype; auto: bfloat16 (default: {defaults.DTYPE})")
    add("--precision", choices=PRECISIONS, help=f"weight precision (default: {defaults.PRECISION})")
    parser.epilog = (
        "A choice is saved if it gives the same bits as the default and takes at most 97 percent of its time. At the "
        "end of each model, its time with and without the choices is compared; without a gain they are dropped. Tables "
        "are in $FASTDIFF_TABLES (default: ~/.cache/fastdiff/tables) and do not change the pictures. "
        "Exit codes: 0 all that the time allowed was tuned; 1 some shapes failed; 2 there is no GPU, or the input "
        "cannot be used."
    )


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return found


def run(args: argparse.Namespace) -> int:
    """Print a row for each shape and each model. Return 0 if all could be proven, else 1. InputError without a GPU."""
    require_stdout()
    forwards, card = _forwards(args)
    from fastdiff.tuning import tables, tuner

    if reason := tables.refused(card):
        say(printable(f"starting anew: {reason}"))
    tuning = tuner.Tuning(forwards, card, args.minutes)
    CTRL_C.describe = lambda: "fastdiff: interrupted; the table has all finished shapes, and the same command goes on"
    try:
        for row in tuning.rows():
            print(json.dumps(row) if args.json else printable(_line(row)), flush=True)
    finally:
        CTRL_C.describe = lambda: "fastdiff: interrupted"
    if tuning.unfinished:
        lines = map(printable, tuning.unfinished)
        say("\n".join(["the time is over, and the same command goes on; not tuned yet:", *lines]))
    if tuning.wrong:
        say("\n".join(["not tuned:", *map(printable, tuning.wrong)]))
    elif not args.json:
        in_use = any(tables.kept(card).choices.values())
        print(printable(f"saved in {tables.table_of(card)}{'' if in_use else ', which has no choices'}"))
    return 1 if tuning.wrong else 0


def _forwards(args: argparse.Namespace) -> "tuple[dict[str, Make], str]":
    """Return what to tune, and the card. InputError for input that cannot be used."""
    from fastdiff.tuning.models import WORKLOADS

    unknown = next((name for name in args.workload if name not in WORKLOADS), None)
    if unknown is not None:
        raise InputError(f"unknown WORKLOAD {shown(unknown)}; use {', '.join(WORKLOADS)}")
    if args.workload and args.model is not None:
        raise InputError("--model and WORKLOAD exclude each other; give only one")
    if args.model is None:
        given = next((name for name in OF_MODEL if getattr(args, name) is not None), None)
        if given is not None or args.batch_size != (1,):
            raise InputError(f"--{(given or 'batch_size').replace('_', '-')} needs --model")
    from fastdiff.tuning import tuner

    if args.model is None:
        return tuner.of_workloads(args.workload or list(WORKLOADS)), tuner.find_card()
    request = Request.from_flags({name: value for name, value in vars(args).items() if name != "size"})
    from fastdiff.runs.drawing import find_model
    from fastdiff.runs.option_files.controlnets import check_controlnets

    card = tuner.find_card()  # before anything is downloaded
    model = find_model(request)
    check_controlnets(request)
    if args.size and model.config.of_trajectories:
        raise InputError(f"--size: {model.name} draws trajectories; leave it out")
    from fastdiff.tuning.drawings.user_models import of_model

    found = [{"width": width, "height": height} for width, height in args.size or ()] or [{}]
    return of_model(request, model, found, args.batch_size), card


def _line(row: dict[str, Any]) -> str:
    """Return a row as text: the shape, its times and the choice; or the forward and its gain."""
    if "operation" not in row:
        return _line_of_forward(row)
    choice = "default kept" if row["choice"] is None else f"{row['choice']} instead of {row['usual']}"
    refused = f", {len(row['refused'])} of {row['candidates']} refused" if row["refused"] else ""
    times = f"{1e3 * row['usual_ms']:.1f} us, best {1e3 * row['best_ms']:.1f} us"
    progress = f"{row['measured']}/{row['shapes']}, {row['seconds_left'] / 60:.1f} min left"
    return f"{row['workload']}  [{progress}]  {row['operation']} {row['shape']}: {times}; {choice}{refused}"


def _line_of_forward(row: dict[str, Any]) -> str:
    shapes = f"{row['measured']} of {row['shapes']} shapes measured"
    if not row["choices"]:
        return f"{row['workload']}: {shapes}; the defaults are the fastest"
    usual, tuned = row["usual_ms"], row["tuned_ms"]
    times = f"{usual:.3f} ms, with the table {tuned:.3f} ms ({usual / tuned:.3f} times as fast)"
    lost = f"; no gain, so {row['dropped']} choices were dropped" if row["dropped"] else ""
    return f"{row['workload']}: {shapes}, {row['choices']} with a faster choice; {times}{lost}"

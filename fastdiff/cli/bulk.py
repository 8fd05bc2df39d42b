"""`fastdiff bulk`: draw many pictures, from flags or from a file of labels or prompts.

The command starts workers by torchrun. If torchrun started this process itself (`torchrun ... -m fastdiff bulk ...`),
it is a worker.
"""

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff.cli.arguments import (
    add_drawing_arguments,
    add_file_arguments,
    add_model_arguments,
    add_picture_arguments,
    count,
)
from fastdiff.cli.streams import Notices, require_stdout, say
from fastdiff.errors import DeviceLostError, InputError, NonFiniteError
from fastdiff.requests import defaults
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request

if TYPE_CHECKING:
    from fastdiff.bulk.folder import Folder
    from fastdiff.bulk.launching import LaunchOptions
    from fastdiff.bulk.plan import Plan

_SHOWN = 5  # lines shown of notices, damaged shards and given-up shards
FORMATS = ("png", "webdataset", "npz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_picture_arguments(parser, labels="all of the model's", prompts="all of the model's examples", pictures="1")
    add = add_model_arguments(
        parser, "-m", "--model", note=f" (default: {defaults.MODEL})", of_files=add_file_arguments
    )
    add_drawing_arguments(add)
    size = "pictures per batch; does not change the pictures (default: depends on their size)"
    add("-b", "--batch-size", type=count, metavar="N", help=size)
    workers = "worker processes, or auto (default: one per GPU, or one per CPU core)"
    add("--workers", type=_workers, metavar="N", help=workers)
    mixed = "allow workers with other GPUs or versions; bits may differ, and each shard's JSON has its fingerprint"
    add("--allow-mixed", action="store_true", help=mixed)
    _add_output_arguments(parser)
    parser.epilog = (
        "Run the same command again to resume an interrupted run. On several hosts: torchrun ... -m fastdiff bulk ..."
    )


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    columns = "label or prompt, seed, num_images, image, strength, mask, control, ip_adapter_image"
    rows = f".json, .jsonl or .csv file of rows: {columns}; replaces --label"
    add("--spec", metavar="FILE", help=rows)
    add("-o", "--out", required=True, metavar="DIR", help="output folder; several hosts may share it")
    add("--format", choices=FORMATS, default="png", help="folders of PNGs, webdataset tars or .npz (default: png)")
    add("--shard-size", type=count, metavar="N", help="pictures per shard (default: depends on their size and number)")
    add(
        "--verify",
        action="store_true",
        help="check the SHA-256 of finished shards first, and redraw damaged ones",
    )
    add("--json", action="store_true", help="print one JSON object per shard on stdout")
    add("-q", "--quiet", action="store_true", help="print only errors on stderr")


def _workers(text: str) -> int | None:
    return None if text == "auto" else count(text)


def run(args: argparse.Namespace) -> int:
    """Draw what `args` ask for. Raises the errors that `main` turns into exit codes."""
    from fastdiff.bulk.folder import Folder
    from fastdiff.bulk.launching import LaunchOptions, is_worker
    from fastdiff.bulk.plan import Plan
    from fastdiff.runs.drawing import find_model
    from fastdiff.runs.model_files import located
    from fastdiff.runs.option_files.controlnets import check_controlnets
    from fastdiff.runs.option_files.embeddings import with_embeddings_here
    from fastdiff.runs.option_files.inputs import with_inputs_here
    from fastdiff.runs.option_files.ip_adapters import check_ip_adapters
    from fastdiff.runs.option_files.loras import with_loras_here

    if args.spec and (args.styles or args.style):
        raise InputError("style: does not change the prompts of --spec; write its text into the rows, or leave it out")
    source = None if args.source is None else Recorded.read(args.source)
    request = located(Request.from_flags(vars(args), source), source, args.models_dir)
    request = with_embeddings_here(request, source, args.embedding_dir)
    request = with_loras_here(request, source, args.lora_dir)
    request = with_inputs_here(request, source, args.input_dir, vars(args))
    check_controlnets(request)
    check_ip_adapters(request)
    sizes = {"shard_size": args.shard_size, "batch_size": args.batch_size}
    plan = Plan.make(request, find_model(request), spec=args.spec, format=args.format, decode=not is_worker(), **sizes)
    folder = Folder(args.out, args.format)
    options = LaunchOptions(args.device, args.offload, args.allow_mixed, args.workers)
    return _work(args, plan, folder, options) if is_worker() else _launch(args, plan, folder, options)


def _work(args: argparse.Namespace, plan: "Plan", folder: "Folder", options: "LaunchOptions") -> int:
    """Run as a worker. An error that a restart cannot fix is reported to our launcher, if there is one."""
    from fastdiff.bulk.launching import is_ours, report_end, work

    if args.verify and not is_ours():
        raise InputError("--verify: every torchrun worker would repeat it; run fastdiff bulk --verify on one host")
    logging.getLogger("fastdiff").setLevel(logging.ERROR)  # the launcher or the first worker prints the notices
    is_first = os.environ.get("RANK") == "0" and not is_ours()
    try:
        if is_first:
            _say_notices(plan, args)
        start = time.perf_counter()
        with _progress(args, folder) if is_first else nullcontext():
            code = work(plan, folder, options, _nothing if args.quiet else say)
        if code or is_ours():
            return code
        say_error = say if is_first else _nothing
        return _conclude(plan, folder, time.perf_counter() - start, _nothing if args.quiet else say_error, say_error)
    except DeviceLostError:
        raise
    except (InputError, NonFiniteError, OSError, MemoryError) as error:
        if not report_end(2 if isinstance(error, InputError) else 1, str(error)):
            raise
        return 0


def _launch(args: argparse.Namespace, plan: "Plan", folder: "Folder", options: "LaunchOptions") -> int:
    from fastdiff.bulk.launching import Ended, launch
    from fastdiff.checkpoints.model_hash import begin_files_hash
    from fastdiff.runs.option_files.kinds import files_of
    from fastdiff.runs.progress import in_terminal

    start = time.perf_counter()
    if args.json:
        require_stdout()
    folder.check(plan)
    tell = _nothing if args.quiet else say
    _say_notices(plan, args)
    for line in _first(list(_damaged(plan, folder, args.verify)), "shards"):
        tell(line)
    if folder.is_complete(plan):
        if not options.allow_mixed:
            more = files_of(plan.run.request)
            folder.check_files(begin_files_hash(plan.run.card, plan.run.request.variant, more).result())
        tell(f"all {len(plan.shards)} shards in {folder.path} are done")
        return 0
    if not in_terminal():
        tell(f"drawing {len(plan.run.cells)} pictures into {folder.path}")
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        with _progress(args, folder):
            launch(args.argv[1:], plan, folder, options)
    except SignalException as error:
        say(f"interrupted; {_summary(plan, folder)}; run the same command again to resume")
        return 128 + error.sigval
    except Ended as error:
        say(f"error: {error}")
        return error.code
    return _conclude(plan, folder, time.perf_counter() - start, tell, say)


def _say_notices(plan: "Plan", args: argparse.Namespace) -> None:
    from fastdiff.runs.notices import find_notices
    from fastdiff.runs.option_files.inputs import dropped_mask

    of_source = [] if args.source is None else dropped_mask(Recorded.read(args.source), plan.run.request)
    with Notices(args.quiet) as notices:
        notices.say(*of_source, *_first(find_notices(plan.run), "lines"))


def _damaged(plan: "Plan", folder: "Folder", every_byte: bool) -> Iterator[str]:
    """Yield a line for each damaged shard, which will be drawn again."""

    def problem(shard) -> str | None:
        if every_byte:
            return folder.verify(shard)
        is_sound = folder.is_done(shard) or not folder.record(shard).exists()
        return None if is_sound else "its files are missing or have the wrong size"

    with ThreadPoolExecutor(8) as pool:
        for shard, found in zip(plan.shards, pool.map(problem, plan.shards), strict=True):
            if found:
                folder.forget(shard)
                yield f"shard {shard.name}: {found}; it will be drawn again"


def _progress(args: argparse.Namespace, folder: "Folder") -> AbstractContextManager[None]:
    from fastdiff.bulk.progress import shown

    return shown(folder.path, bar=not args.quiet, print_line=_print_line if args.json else None)


def _print_line(line: str) -> None:
    from tqdm import tqdm

    with tqdm.external_write_mode():
        print(line, flush=True)


def _nothing(line: str) -> None:
    """Say nothing: another worker says it."""


def _conclude(
    plan: "Plan", folder: "Folder", seconds: float, tell: Callable[[str], None], say_error: Callable[[str], None]
) -> int:
    """Print what is done. Return 1 if shards were given up, else 0."""
    from fastdiff.bulk.attempts import Attempts

    given_up = Attempts(folder.shards).given_up()
    tell(f"{_summary(plan, folder)} in {seconds:.1f} s")
    if not given_up:
        return 0
    for line in _first([f"shard {name}: {reason}" for name, reason in given_up.items()], "shards"):
        say_error(line)
    rest = "run the same command again to retry them"
    say_error(f"error: gave up on {len(given_up)} of {len(plan.shards)} shards; {rest}")
    return 1


def _summary(plan: "Plan", folder: "Folder") -> str:
    from fastdiff.bulk.progress import Reader

    state = Reader(Path(folder.path)).read()
    drawn = state.drawn if state else 0
    return f"{drawn} of {len(plan.run.cells)} pictures are in {folder.path}"


def _first(lines: list[str], what: str) -> list[str]:
    """Return the first few lines, and a line that counts the others."""
    rest = len(lines) - _SHOWN
    return lines if rest <= 0 else [*lines[:_SHOWN], f"and {rest} more {what}"]

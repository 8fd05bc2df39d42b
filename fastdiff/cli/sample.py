"""`fastdiff sample`: draw pictures from flags into PNG files, with a progress bar.

`run` imports the drawing code, so the other commands start without it.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.cli.arguments import (
    Rare,
    add_drawing_arguments,
    add_file_arguments,
    add_model_arguments,
    add_picture_arguments,
    count,
)
from fastdiff.cli.interruption import CTRL_C
from fastdiff.cli.streams import Notices, require_stdout
from fastdiff.errors import InputError
from fastdiff.requests import defaults
from fastdiff.requests.defaults import BATCH_ON_CPU, COMMAND
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request

if TYPE_CHECKING:
    from fastdiff.pipelines import Pipeline
    from fastdiff.runs.drawing import Finished, Run
    from fastdiff.runs.output import Output


@dataclass
class Written:
    """The files that a run has written so far."""

    pictures: list[Path] = field(default_factory=list)
    grid: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_picture_arguments(
        parser,
        labels=f"up to {COMMAND.labels}, evenly spaced",
        prompts=f"up to {COMMAND.prompts} of the model's examples",
        pictures=f"1 per --prompt, else {COMMAND.pictures} in all",
    )
    add = add_model_arguments(
        parser,
        "-m",
        "--model",
        note=f" (default: {defaults.MODEL} or {defaults.MODEL_OF_LABELS})",
        of_files=add_file_arguments,
    )
    add_drawing_arguments(add)
    add(
        "-b",
        "--batch-size",
        type=count,
        metavar="N",
        help=f"pictures per batch (default: {COMMAND.batch_size}; on a CPU {BATCH_ON_CPU})",
    )
    _add_output_arguments(parser)
    parser.epilog = "A model's own defaults come from its fastdiff.json; 'fastdiff models NAME' prints them."


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add = group.add_argument
    add(
        "-o",
        "--out",
        default="outputs",
        help="folder, PNG or pattern: {seed}, {label}, {prompt} (default: outputs)",
    )
    either = group.add_mutually_exclusive_group().add_argument
    either("--overwrite", action="store_true", help="replace existing files (default: new ones are named a-2.png)")
    either(
        "--resume",
        action="store_true",
        help="keep the files of an interrupted run; fail if one has other settings",
    )
    add(
        "--grid",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE.png",
        help="also write one sheet of all pictures (default name: grid.png)",
    )
    add("--embed-inputs", action="store_true", help=Rare("put the given pictures into the PNGs"))
    add("--json", action="store_true", help="print one JSON object per picture on stdout")
    add("-q", "--quiet", action="store_true", help="print only errors on stderr")
    add(
        "--explain",
        action="store_true",
        help="draw nothing; print which kernel runs each operation, and why",
    )


def run(args: argparse.Namespace) -> int:
    """Draw what `args` ask for. Raises the errors that `main` turns into exit codes."""
    with Notices(args.quiet) as notices:
        return _sample(args, notices)


def _sample(args: argparse.Namespace, notices: Notices) -> int:
    from fastdiff.runs.drawing import Run, begin_hashes, find_model
    from fastdiff.runs.model_files import located
    from fastdiff.runs.notices import find_device_notices, find_notices, find_source_notices
    from fastdiff.runs.option_files.controlnets import check_controlnets
    from fastdiff.runs.option_files.embeddings import with_embeddings_here
    from fastdiff.runs.option_files.inputs import with_inputs_here
    from fastdiff.runs.option_files.ip_adapters import check_ip_adapters
    from fastdiff.runs.option_files.loras import with_loras_here
    from fastdiff.runs.output import Output
    from fastdiff.runs.progress import in_terminal

    start = time.perf_counter()
    if args.json or args.explain:
        require_stdout()
    source = None if args.source is None else Recorded.read(args.source)
    request = located(Request.from_flags(vars(args), source), source, args.models_dir)
    request = with_embeddings_here(request, source, args.embedding_dir)
    request = with_loras_here(request, source, args.lora_dir)
    request = with_inputs_here(request, source, args.input_dir, vars(args))
    check_controlnets(request)
    check_ip_adapters(request)
    if args.resume and request.seed == "random":
        raise InputError("--resume cannot repeat random seeds; give the seeds of the interrupted run with --seed")
    run = Run.prepare(request, find_model(request), COMMAND, batch_size=args.batch_size)

    def load() -> tuple[Run, "Pipeline"]:
        from fastdiff.pipelines import load_pipeline  # imports torch

        options = {"offload": args.offload, "names_loras": run.names_loras}
        pipe = load_pipeline(run.card, run.request, args.device, **options)
        is_open = args.batch_size is None and pipe.device.type == "cpu"
        return (replace(run, batch_size=BATCH_ON_CPU) if is_open else run), pipe

    if args.explain:
        notices.say(*find_notices(run))
        return _explain(*load(), args.json)
    ways = {"overwrite": args.overwrite, "resume": args.resume, "grid": args.grid, "embeds": args.embed_inputs}
    output = Output.check(run, args.out, device=args.device, **ways)
    lines = [*find_notices(run), *output.notices()]
    output.remove_abandoned()
    notices.say(*lines)
    written = Written()
    line_break = "\n" if in_terminal() else ""  # the line stands below a progress bar
    CTRL_C.describe = lambda: f"{line_break}fastdiff: interrupted; {_summary(run, output, written)}"

    def load_saying() -> tuple[Run, "Pipeline"]:
        begin_hashes(run)  # beside the loading
        loaded, pipe = load()
        # after the loading, whose errors are the only line
        notices.say(*find_source_notices(source, request), *find_device_notices(pipe.device))
        if not in_terminal():
            count = len(output.missing)
            notices.say(f"drawing {count} {_things(run, count)} with {run.card.name}")
        return loaded, pipe

    _draw(run, output, load_saying, args.json, written, notices)
    if args.resume or output.missing or output.grid:
        notices.say(f"{_summary(run, output, written)} in {time.perf_counter() - start:.1f} s")
    else:
        notices.say(_nothing_new(run, output))
    return 0


def _explain(run: "Run", pipe: "Pipeline", as_json: bool) -> int:
    from fastdiff.pipelines.reporting import report
    from fastdiff.runs.drawing import first_batch

    found = report(pipe, **first_batch(run))
    print(json.dumps(found.as_dict()) if as_json else found)
    return 0


def _draw(
    run: "Run",
    output: "Output",
    load: Callable[[], tuple["Run", "Pipeline"]],
    as_json: bool,
    written: Written,
    notices: Notices,
) -> None:
    """Draw and write the missing pictures, then the grid. Each completed path is added to `written`.

    `load` returns the pipeline, and the run with the batch size for its device.
    """
    from tqdm import tqdm

    from fastdiff.runs.resuming import load_picture
    from fastdiff.runs.sheet import ContactSheet

    sheet = ContactSheet(len(run.cells), output.columns)
    record: dict[str, Any] = {}
    for place, record in output.kept.items():
        if output.grid:
            sheet.paste(place, load_picture(output.paths[place], record))
        if as_json:
            print(_json_line(output.paths[place], record), flush=True)

    def keep(finished: "Finished") -> None:
        nonlocal record
        record = finished.record
        with CTRL_C.deferred():  # Ctrl-C must not separate a file from its line and its entry in `written`
            path = output.write(finished)
            written.pictures.append(path)
            if as_json:
                with tqdm.external_write_mode():
                    print(_json_line(path, record), flush=True)
        if output.grid:
            sheet.paste(finished.place, finished.image)

    if output.missing:
        _draw_missing(*load(), output, keep, notices)
    if output.grid and sheet.image:
        with CTRL_C.deferred():
            written.grid = output.write_grid(output.grid, sheet.image, run, record)


def _draw_missing(
    run: "Run", pipe: "Pipeline", output: "Output", keep: Callable[["Finished"], None], notices: Notices
) -> None:
    """Draw the missing pictures and show the progress. A thread calls `keep` for each."""
    from fastdiff.runs.drawing import draw
    from fastdiff.runs.progress import show
    from fastdiff.runs.writing import write_beside

    missing = output.missing
    rest = replace(run, cells=[run.cells[place] for place in missing])
    with closing(show(len(rest.cells), _things(run, 2), quiet=notices.quiet)) as bar:
        steps = write_beside(draw(rest, pipe), lambda done: keep(replace(done, place=missing[done.place])))
        for progress, _ in steps:
            bar.update(progress.done - bar.n)  # summing each step's share would miss the total by rounding
            if progress.step.notice:
                notices.say(progress.step.notice)


def _things(run: "Run", count: int) -> str:
    """Return "picture" or "trajectory", in the plural unless `count` is 1."""
    one, many = ("trajectory", "trajectories") if run.card.config.of_trajectories else ("picture", "pictures")
    return one if count == 1 else many


def _json_line(path: Path, record: Mapping[str, Any]) -> str:
    from fastdiff.runs.output import trajectory_path

    line = {"path": str(path), "seed": record["seed"], "label": record["label"], "settings": record}
    line |= {"prompt": record["prompt"]} if "prompt" in record else {}
    return json.dumps(line | ({"trajectory": str(trajectory_path(path))} if "horizon" in record else {}))


def _summary(run: "Run", output: "Output", written: Written) -> str:
    pictures, count = written.pictures, len(output.missing)
    text = f"kept {len(output.kept)}, " if output.kept else ""
    text += f"wrote {count if len(pictures) == count else f'{len(pictures)} of {count}'}"
    text += f" {_things(run, count)}"
    text += f" to {_place(pictures)}" if pictures else ""
    return text + (f" and a grid to {written.grid}" if written.grid else "")


def _nothing_new(run: "Run", output: "Output") -> str:
    count = len(output.paths)
    if count == 1:
        return f"{output.paths[0]} exists with these settings and was kept; --overwrite draws it again"
    things = f"{count} {_things(run, count)} in {_place(output.paths)}"
    return f"{things} exist with these settings and were kept; --overwrite draws them again"


def _place(paths: Sequence[Path]) -> str:
    """Return the path, or the folder of several."""
    return str(paths[0]) if len(paths) == 1 else os.path.commonpath([path.parent for path in paths]) or "."

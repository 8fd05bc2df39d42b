"""The command line: `fastdiff sample`, `info`, `models`, `verify` and `ui`. Parsing and dispatch only.

Whatever does not need torch happens without it, so that help and errors come at once.
Exit codes: 0 done; 1 the run failed; 2 the input cannot be used; 130 interrupted; 141 nobody reads the output any more.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fastdiff import __version__
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.registry import SCHEDULERS
from fastdiff.cli import ui
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.requests import png
from fastdiff.requests.request import DEFAULT_MODEL, DEFAULT_PICTURES, DTYPES, MAX_SEED, ModelCard

_DEVICES = "auto, cpu, cuda or cuda:1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `argv` (default: the process's arguments) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in a notebook it is something else
            stream.reconfigure(errors="backslashreplace")  # a label need not fit the terminal's encoding
    try:
        args = _parser().parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes stdout once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except InputError as error:
        return _fail(error, 2)
    except (NonFiniteError, OSError, MemoryError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("fastdiff: interrupted", file=sys.stderr)
        return 130


def _fail(error: Exception, code: int) -> int:
    print(f"fastdiff: error: {_printable(str(error) or type(error).__name__)}", file=sys.stderr)
    return code


def _printable(text: str) -> str:
    """`text` as one line without control characters: a file's name or contents must not drive the terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastdiff", description="Draw pictures with diffusion models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastdiff {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add_arguments, run, summary in (
        ("sample", _add_sample_arguments, _sample, "draw pictures"),
        ("info", _add_info_arguments, _info, "print the settings inside a PNG"),
        ("models", _add_models_arguments, _models, "list the models that are bundled or cached, or one model's labels"),
        ("verify", _add_verify_arguments, _verify, "compare a model with diffusers, number by number"),
        ("ui", ui.add_arguments, ui.run, "serve a web page that draws pictures"),
    ):
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False)
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


def _add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    add = _add_model_arguments(parser, "-m", "--model", note=f" (default: {DEFAULT_MODEL})")
    add("--dtype", choices=DTYPES, help="number format of the model (default: auto)")
    add("-b", "--batch-size", type=_count, default=8, metavar="N", help="pictures drawn at a time (default: 8)")

    add = parser.add_argument_group("picture").add_argument
    add("--label", action="append", help="name or index of a label, may be repeated (default: up to 4, evenly spread)")
    add("--num-images", type=int, metavar="N", help=f"pictures per label (default: {DEFAULT_PICTURES} pictures in all)")
    add("-s", "--seed", help=f"7, 1,2,5-10 or random, 0 to {MAX_SEED}; picture i has seed + i (default: 0)")
    add("--steps", "--num-inference-steps", dest="num_inference_steps", type=int, metavar="N", help="(default: 50)")
    add("--scheduler", choices=SCHEDULERS, help="how noise is removed (default: as the model asks)")
    add("--eta", type=float, help="noise added in a DDIM step, from 0 to 1 (default: 0)")
    add(
        "--cfg-scale", "--guidance-scale", dest="guidance_scale", type=float, help="how much the label counts; 1: plain"
    )
    add("--from", dest="source", metavar="FILE.png", help="reuse the settings of this PNG; other flags win")

    add = parser.add_argument_group("output").add_argument
    add("-o", "--out", default="outputs", help="folder, PNG file or pattern of {seed} and {label} (default: outputs)")
    add("--overwrite", action="store_true", help="replace files that exist, which is otherwise refused")
    add(
        "--grid",
        nargs="?",
        const=True,
        metavar="FILE.png",
        help="also a sheet of all pictures (default name: grid.png)",
    )
    add("--json", action="store_true", help="print one JSON object per picture on stdout")
    add(
        "--explain",
        action="store_true",
        help="draw nothing: print which kernel each operation of a step of the first batch runs on, and why",
    )
    parser.epilog = "Steps, scheduler, eta and cfg-scale default to what the model's fastdiff.json says, if it does."


def _add_info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME", help="print the labels and defaults of this model")


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    add = _add_model_arguments(parser, "model", note="")
    add("--steps", dest="num_inference_steps", type=int, default=4, metavar="N", help="of sampling (default: 4)")
    add("--json", action="store_true", help="print a JSON object")


def _add_model_arguments(parser: argparse.ArgumentParser, *names: str, note: str) -> Callable[..., argparse.Action]:
    """The arguments of every command that runs a model, itself as `names`; returns what adds more to their group."""
    add = parser.add_argument_group("model").add_argument
    add(*names, metavar="MODEL", help=f"bundled name, diffusers folder or hub id{note}")
    add("--revision", help="branch, tag or commit of a hub model")
    add("--variant", help="variant of the weight files, such as fp16")
    add("--device", type=_device, default="auto", help=f"{_DEVICES} (default: auto)")
    return add


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _device(text: str) -> str:
    if text not in ("auto", "cpu", "cuda") and not text.removeprefix("cuda:").isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not {_DEVICES}")
    return text


def _sample(args: argparse.Namespace) -> int:
    from fastdiff.runs import drawing

    return drawing.run(args)


def _verify(args: argparse.Namespace) -> int:
    from fastdiff.runs import verification

    return verification.run(args)


def _info(args: argparse.Namespace) -> int:
    texts = png.read_text(args.file)
    if not texts:
        raise InputError(f"{args.file} holds no settings; name a PNG that fastdiff or a kindred tool wrote")
    record = png.parse_record(texts["fastdiff"], args.file) if "fastdiff" in texts else None
    if args.json:
        print(json.dumps({"parameters": texts.get("parameters"), "fastdiff": record}))
        return 0
    for line in texts.get("parameters", "").splitlines():
        print(_printable(line))
    for key, value in sorted((record or {}).items()):
        print(_printable(f"{key}: {value if isinstance(value, str) else json.dumps(value)}"))
    return 0


def _models(args: argparse.Namespace) -> int:
    if args.model is None:
        for origin, found in (("bundled", hub.bundled_models()), ("cached", hub.cached_models())):
            for name, folder in found.items():
                print(_printable(f"{name:<40} {origin:<8} {_summary(name, folder)}"))
        return 0
    card = ModelCard.read(args.model, hub.resolve(args.model, local_files_only=True))
    print(_printable(f"{args.model}: {_described(card)}"))
    for name, value in vars(card.info).items():
        if name not in ("labels", "label_groups", "replaced_labels") and value is not None:
            print(f"{name}: {value}")
    for label in card.labels:
        print(_printable(f"{label:>5}  {card.label_name(label)}"))
    for group, names in card.info.label_groups.items():
        print(_printable(f"group  {group}: {', '.join(names)}"))
    return 0


def _summary(name: str, folder: Path) -> str:
    try:
        return _described(ModelCard.read(name, folder))
    except InputError as error:
        return f"cannot be drawn with: {error}"


def _described(card: ModelCard) -> str:
    size = "x".join(map(str, card.size)) if card.size else "any size"
    return f"{size}, {card.scheduler or 'no scheduler'}, {len(card.labels) or 'no'} labels"

"""The command line, one module per command: `fastdiff sample`, `bulk`, `status`, `info`, `models`, `convert`, `verify`,
`bench`, `ui`, `serve`, `doctor`, `tune`, `warm`, `completion`.

These modules only parse and print. They import torch only where they need it, so help and errors appear at once.

Exit codes: 0 done; 1 the run failed; 2 the input cannot be used; 130 interrupted; 141 the reader of stdout is gone.
"""

import errno
import os
import sys
from collections.abc import Sequence

from fastdiff import __version__
from fastdiff.cli import (
    bench,
    bulk,
    completion,
    convert,
    doctor,
    info,
    models,
    sample,
    serve,
    status,
    streams,
    tune,
    ui,
    verify,
    warm,
)
from fastdiff.cli.arguments import Parser
from fastdiff.cli.interruption import CTRL_C, EXIT_CODE
from fastdiff.errors import DeviceLostError, InputError, NonFiniteError

_COMMANDS = {
    "sample": (sample, "draw pictures from prompts or labels"),
    "bulk": (bulk, "draw many pictures on all GPUs of one or more hosts"),
    "status": (status, "show the progress of a bulk run"),
    "info": (info, "print the settings stored in a PNG, or what a safetensors file is"),
    "models": (models, "list the models that are here, or show the details of one"),
    "convert": (convert, "write the diffusers folder of a safetensors file"),
    "verify": (verify, "check a model's results against diffusers"),
    "bench": (bench, "time a model's denoiser in fastdiff and in diffusers"),
    "ui": (ui, "serve a web page for drawing pictures"),
    "serve": (serve, "serve OpenAI's images API over HTTP"),
    "doctor": (doctor, "check this machine: hardware, software, and which kernels run"),
    "tune": (tune, "find the fastest kernel tiles for this GPU and save them"),
    "warm": (warm, "compile a model's kernels beforehand, also without a GPU"),
    "completion": (completion, "print a script that completes commands in a shell"),
}

EXAMPLES = """\
Draw pictures with diffusion models.

examples:
  fastdiff sample --prompt "green dog, glossy 3D emoji"             draw a picture into outputs/
  fastdiff sample --prompt "red fox" --num-images 4 --grid          draw four, and a sheet of all
  fastdiff sample --from outputs/red-fox-0.png --seed 7 --steps 40  change settings of a picture
  fastdiff ui                                                       draw in the browser

'fastdiff COMMAND --help' lists the options of a command."""

NO_MEMORY = "out of memory; use a smaller --batch-size, or close other programs"  # Python's MemoryError has no message


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `argv` and return its exit code.

    Without `argv`, run the process's own arguments and handle Ctrl-C. A failed GPU then ends the process here.
    """
    streams.prepare()
    if argv is None:
        CTRL_C.install()
        _wait_briefly()
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        code = 141
    except InputError as error:
        code = _fail(error, 2)
    except (NonFiniteError, OSError, MemoryError) as error:
        code = _fail(error, 1)
    except DeviceLostError as error:
        code = _fail(error, 1)
        if argv is None:
            streams.drop_unwritten(sys.stdout)
            os._exit(code)  # Python's shutdown would free the GPU's memory: each free fails, or hangs
    except KeyboardInterrupt:
        streams.say("interrupted")
        code = EXIT_CODE
    streams.drop_unwritten(sys.stdout)
    return code


def _wait_briefly() -> None:
    """Let torch's threads on a CPU sleep soon when they wait for each other.

    By default they wait for milliseconds in a loop. Beside another busy process, this loop takes the core of the thread
    that they wait for. OpenMP reads the variable when torch is imported. A setting of the user stays.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


def _run(argv: Sequence[str] | None) -> int:
    try:
        parser = _parser()
        args = parser.parse_args(argv)
        args.parser = parser
        args.argv = list(sys.argv[1:] if argv is None else argv)
    except SystemExit:  # --help and --version have printed
        return 0
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(f"the current folder cannot be used ({error.strerror}); change to another one") from None
    try:
        return args.run(args)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{error.filename}: {error.strerror}; give a shorter one") from None
        raise


def _fail(error: Exception, code: int) -> int:
    text = str(error) or (NO_MEMORY if isinstance(error, MemoryError) else type(error).__name__)
    streams.say(f"error: {streams.error_line(text)}")
    return code


def _parser() -> Parser:
    parser = Parser(prog="fastdiff", usage="fastdiff COMMAND [options]", examples=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"fastdiff {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=parser.prog)
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser

"""The command line: `fastdiff sample`, `info`, `models`, `verify` and `ui`, a file each. Parsing and printing only.

Whatever does not need torch happens without it, so that help and errors come at once.
Exit codes: 0 done; 1 the run failed; 2 the input cannot be used; 130 interrupted; 141 nobody reads the output any more.
"""

import io
import os
import sys
from collections.abc import Sequence

from fastdiff import __version__
from fastdiff.cli import info, models, sample, ui, verify
from fastdiff.cli.arguments import Parser, printable
from fastdiff.errors import InputError, NonFiniteError

_COMMANDS = {
    "sample": (sample, "draw pictures"),
    "info": (info, "print the settings inside a PNG"),
    "models": (models, "list the models that are bundled or cached, or one model's labels"),
    "verify": (verify, "compare a model with diffusers, number by number"),
    "ui": (ui, "serve a web page that draws pictures"),
}


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
    print(f"fastdiff: error: {printable(str(error) or type(error).__name__)}", file=sys.stderr)
    return code


def _parser() -> Parser:
    parser = Parser(prog="fastdiff", description="Draw pictures with diffusion models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastdiff {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser

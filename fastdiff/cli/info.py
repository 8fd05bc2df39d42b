"""`fastdiff info`: print the settings stored in a PNG."""

import argparse
import json

from fastdiff.cli.streams import printable, require_stdout
from fastdiff.errors import InputError
from fastdiff.requests import png


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the settings. InputError if the file holds none."""
    require_stdout()
    texts = png.read_text(args.file)
    if not texts:
        raise InputError(f"{args.file} holds no settings; give a PNG from fastdiff or a compatible tool")
    record = png.parse_record(texts["fastdiff"], args.file) if "fastdiff" in texts else None
    if args.json:
        print(json.dumps({"parameters": texts.get("parameters"), "fastdiff": record}))
        return 0
    for line in texts.get("parameters", "").splitlines():
        print(printable(line))
    for key, value in sorted((record or {}).items()):
        print(printable(f"{key}: {value if isinstance(value, str) else json.dumps(value)}"))
    return 0

"""`fastdiff info`: print the settings stored in a PNG, or what a file of weights is."""

import argparse
import json
from typing import Any

from fastdiff.adapters.headers import facts_of
from fastdiff.checkpoints.single_files.reading import has_model_suffix
from fastdiff.cli.streams import printable, require_stdout
from fastdiff.errors import InputError
from fastdiff.requests import png

MOST_CHARACTERS = 200  # of a value of the metadata; --json prints all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a PNG, or a safetensors file")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    help = "compute the hashes of a large safetensors file too, which reads the whole file"
    parser.add_argument("--hash", action="store_true", help=help)


def run(args: argparse.Namespace) -> int:
    """Print the settings or the facts. InputError if the file holds none."""
    require_stdout()
    if has_model_suffix(args.file):
        facts = facts_of(args.file, with_hash=args.hash or None)
        print(json.dumps(facts) if args.json else "\n".join(map(printable, _lines(facts))))
        return 0
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


def _lines(facts: dict[str, Any]) -> list[str]:
    """Return a line for each fact, and one for each entry of the metadata."""
    lines = []
    for name, value in facts.items():
        if name == "parts":
            value = ", ".join(f"{part} ({dtypes})" for part, dtypes in value.items())
        elif name == "layers":
            value = ", ".join(f"{count} of {part}" for part, count in value.items())
        elif name == "ranks":
            value = ", ".join(map(str, value))
        elif name == "bytes":
            name, value = "size", f"{value / 1e9:.2f} GB" if value >= 1e8 else f"{value / 1e6:.2f} MB"
        elif name == "metadata":
            lines += [f"metadata {key}: {_short(text)}" for key, text in sorted(value.items())]
            continue
        lines.append(f"{name}: {'yes' if value is True else value}")
    return lines if "SHA-256" in facts else [*lines, "SHA-256: --hash computes it, which reads the whole file"]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}... ({len(text)} characters)"

"""`fastdiff convert`: write the diffusers folder of a single file."""

import argparse

from fastdiff.checkpoints.single_files.cards import FileOptions
from fastdiff.cli.arguments import add_file_arguments
from fastdiff.cli.streams import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a safetensors file")
    parser.add_argument("-o", "--out", metavar="FOLDER", required=True, help="a new folder")
    add_file_arguments(parser.add_argument)


def run(args: argparse.Namespace) -> int:
    """Convert the file. InputError for a file that fastdiff cannot load, and for a folder that exists."""
    from fastdiff.pipelines.converting import convert_file

    for line in convert_file(args.file, args.out, FileOptions(args.config, args.vae, args.prediction_type)):
        say(line)
    say(f"wrote {args.out}; fastdiff and diffusers draw with it")
    return 0

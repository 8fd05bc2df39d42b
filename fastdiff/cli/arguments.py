"""Arguments that several commands share, and their types."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from fastdiff.errors import InputError
from fastdiff.requests import defaults

DEVICES = "auto, cpu, cuda or cuda:1"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are InputErrors."""

    def parse_known_args(self, args=None, namespace=None):
        found, rest = super().parse_known_args(args, namespace)
        for name, value in vars(found).items():
            if value == [] or (isinstance(value, list) and [] in value):  # Python's before 3.13 makes [] of --seed=--
                self.error(f"{name}: -- is no value of it")
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def add_model_arguments(parser: argparse.ArgumentParser, *names: str, note: str) -> Callable[..., argparse.Action]:
    """Add the arguments of every command that runs a model, itself as `names`; returns what adds to their group."""
    add = parser.add_argument_group("model").add_argument
    add(*names, metavar="MODEL", help=f"bundled name, diffusers folder or hub id{note}")
    add("--revision", help="branch, tag or commit of a hub model")
    add("--variant", help="variant of the weight files, such as fp16")
    add("--device", type=device, default=defaults.DEVICE, help=f"{DEVICES} (default: {defaults.DEVICE})")
    return add


def count(text: str) -> int:
    """The type of an argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def device(text: str) -> str:
    """The type of an argument that names a device."""
    if text not in ("auto", "cpu", "cuda") and not text.removeprefix("cuda:").isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not {DEVICES}")
    return text

"""Arguments that several commands share, and their types."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from fastdiff.arguments import word
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_SEED
from fastdiff.requests import defaults
from fastdiff.requests.request import DTYPES, PRECISIONS
from fastdiff.sampler_names import SCHEDULERS

DEVICES = "auto, cpu, cuda or cuda:1"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are InputErrors."""

    def parse_known_args(self, args=None, namespace=None):
        words = [word(each) for each in (sys.argv[1:] if args is None else args)]
        found, rest = super().parse_known_args(words, namespace)
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


def add_drawing_arguments(add: Callable[..., argparse.Action]) -> None:
    """Add the arguments of how a model is held in memory to its group."""
    add("--dtype", choices=DTYPES, help=f"number format of the model (default: {defaults.DTYPE})")
    weights = "of the weights: int8 and fp8 take half the memory of 16 bits, for an error that verify measures; fp8 "
    weights += "multiplies in 8 bits too"
    add("--precision", choices=PRECISIONS, help=f"{weights} (default: {defaults.PRECISION})")
    offload = "have each part of the model on the GPU only while it works: less memory, the same pictures"
    add("--offload", action="store_true", help=offload)


def add_picture_arguments(parser: argparse.ArgumentParser, labels: str, prompts: str, pictures: str) -> None:
    """Add the arguments that say what is drawn, and how; `labels`, `prompts`, `pictures` are the defaults of those."""
    add = parser.add_argument_group("picture").add_argument
    add("--label", action="append", help=f"name or index of a label, may be repeated (default: {labels})")
    add("--prompt", action="append", help=f"text that a picture is drawn from, may be repeated (default: {prompts})")
    add("--prompt-file", metavar="FILE", help="text file of further prompts, one a line; blank lines are skipped")
    add("--negative-prompt", metavar="PROMPT", help="text that the pictures are led away from")
    add("--num-images", type=int, metavar="N", help=f"pictures per label or prompt (default: {pictures})")
    seeds = f"7, 1,2,5-10 or random, 0 to {MAX_SEED}; picture i has seed + i (default: {defaults.SEED})"
    add("-s", "--seed", help=seeds)
    steps = f"(default: {defaults.STEPS})"
    add("--steps", "--num-inference-steps", dest="num_inference_steps", type=int, metavar="N", help=steps)
    add("--scheduler", choices=SCHEDULERS, help="how noise is removed (default: as the model asks)")
    add("--eta", type=float, help=f"noise added in a DDIM step, from 0 to 1 (default: {defaults.ETA:g})")
    guidance = "how much the prompt or the label counts; 1: plain"
    add("--cfg-scale", "--guidance", "--guidance-scale", dest="guidance_scale", type=float, help=guidance)
    add("--clip-skip", type=int, metavar="N", help="last layers of the text encoder that are left out (default: 0)")
    for side in ("height", "width"):
        add(f"--{side}", type=int, metavar="PIXELS", help="(default: as the model was trained)")
    add("--horizon", type=int, metavar="N", help="positions of a trajectory, of a model that plans them")
    add("--from", dest="source", metavar="FILE.png", help="reuse the settings of this PNG; other flags win")


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

"""Arguments that several commands share, and their types."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from fastdiff.arguments import did_you_mean, word
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_SEED
from fastdiff.requests import defaults
from fastdiff.requests.request import DTYPES, PRECISIONS
from fastdiff.sampler_names import ETAS, SCHEDULERS

DEVICES = "auto, cpu, cuda or cuda:1"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are InputErrors."""

    def parse_known_args(self, args=None, namespace=None):
        words = [word(each) for each in (sys.argv[1:] if args is None else args)]
        found, rest = super().parse_known_args(words, namespace)
        for name, value in vars(found).items():
            if value == [] or (isinstance(value, list) and [] in value):  # Python before 3.13 parses --seed=-- as []
                self.error(f"{name}: -- is not a value")
        if rest:
            flag = next((each.partition("=")[0] for each in rest if each.startswith("-")), "")
            hint = did_you_mean(flag, self._option_string_actions)
            self.error("; ".join(filter(None, [f"unrecognized arguments: {' '.join(rest)}", hint])))
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for a value that is not a choice. It names similar choices, or else all."""
        if action.choices is not None and value not in action.choices:
            words = list(map(str, action.choices))
            remedy = did_you_mean(str(value), words) or f"choose from {', '.join(words)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {remedy}")

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}{'' if message.endswith('?') else ';'} see {self.prog} --help")


def add_model_arguments(parser: argparse.ArgumentParser, *names: str, note: str) -> Callable[..., argparse.Action]:
    """Add the arguments that all model commands share, and return the `add_argument` of their group.

    Args:
        names: the name or flags of the argument that takes the model.
        note: what to append to the help of that argument.
    """
    add = parser.add_argument_group("model").add_argument
    add(*names, metavar="MODEL", help=f"bundled name, diffusers folder or hub id{note}")
    add("--revision", help="branch, tag or commit of a hub model")
    add("--variant", help="weight file variant, such as fp16")
    add("--device", type=device, default=defaults.DEVICE, help=f"{DEVICES} (default: {defaults.DEVICE})")
    return add


def add_drawing_arguments(add: Callable[..., argparse.Action]) -> None:
    """Add the arguments for the model's dtype, precision and offloading to its group."""
    add("--dtype", choices=DTYPES, help=f"model dtype; auto: bfloat16 on GPU, else float32 (default: {defaults.DTYPE})")
    weights = "weight precision: int8 and fp8 use half the memory of 16 bits, fp8 also multiplies in 8 bits; "
    weights += "'fastdiff verify' measures the error"
    add("--precision", choices=PRECISIONS, help=f"{weights} (default: {defaults.PRECISION})")
    offload = "keep each part of the model on the GPU only while it runs: less memory, same pictures"
    add("--offload", action="store_true", help=offload)


def add_picture_arguments(parser: argparse.ArgumentParser, labels: str, prompts: str, pictures: str) -> None:
    """Add the arguments that say what to draw and how.

    `labels`, `prompts` and `pictures` are the defaults that the help shows for labels, prompts and `--num-images`.
    """
    add = parser.add_argument_group("picture").add_argument
    add("--label", action="append", help=f"label name or index; may be repeated (default: {labels})")
    add("--prompt", action="append", help=f"text to draw; may be repeated (default: {prompts})")
    add("--prompt-file", metavar="FILE", help="text file of more prompts, one per line; blank lines are skipped")
    add("--negative-prompt", metavar="PROMPT", help="text that the pictures should avoid")
    add("--num-images", type=int, metavar="N", help=f"pictures per label or prompt (default: {pictures})")
    seeds = f"seed (picture i uses seed + i), list (1,2,5-10) or random; up to {MAX_SEED} (default: {defaults.SEED})"
    add("-s", "--seed", help=seeds)
    steps = f"denoising steps (default: the model's own, else {defaults.STEPS})"
    add("--steps", "--num-inference-steps", dest="num_inference_steps", type=int, metavar="N", help=steps)
    add("--scheduler", choices=SCHEDULERS, help="sampler (default: the model's own)")
    noisy = " and ".join(name.upper() for name in ETAS)
    add("--eta", type=float, help=f"noise of {noisy} steps, 0 to 1 (default: the model's own, else {defaults.ETA:g})")
    guidance = "guidance scale; 1 is no guidance (default: the model's own, else 1)"
    add("--cfg-scale", "--guidance", "--guidance-scale", dest="guidance_scale", type=float, help=guidance)
    add("--clip-skip", type=int, metavar="N", help="skip the last N layers of the text encoder (default: 0)")
    for side in ("height", "width"):
        add(f"--{side}", type=int, metavar="PIXELS", help="(default: the model's training size)")
    add("--horizon", type=int, metavar="N", help="positions of a trajectory, for models that plan trajectories")
    add("--from", dest="source", metavar="FILE.png", help="reuse the settings in this PNG; other flags override them")


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def device(text: str) -> str:
    """Check the name of a device."""
    if text not in ("auto", "cpu", "cuda") and not text.removeprefix("cuda:").isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not {DEVICES}")
    return text

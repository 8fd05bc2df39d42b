"""Arguments that several commands share, and their types."""

import argparse
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn, get_args

from fastdiff.arguments import did_you_mean, word
from fastdiff.checkpoints.single_files.listing import VARIABLE
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_UPSCALE, PredictionType, UpscaleMode
from fastdiff.requests import defaults
from fastdiff.requests.request import DTYPES, PRECISIONS
from fastdiff.requests.syntax import EMPHASES, EMPHASIS, SYNTAX, SYNTAXES
from fastdiff.sampler_names import ETAS, SCHEDULERS

DEVICES = "auto, cpu, cuda or cuda:1"
Add = Callable[..., argparse.Action]  # `add_argument` of a parser or a group


class Rare(str):
    """The help of an option that few people need. `--help` leaves it out, and `--help-all` shows it."""


class _Formatter(argparse.HelpFormatter):
    """The layout of `--help`. A flag with two names has its value once, as in Python 3.13: `-m, --model MODEL`."""

    shows_all = False  # also options whose help is `Rare`

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30} | options)

    def add_argument(self, action: argparse.Action) -> None:
        if self.shows_all or not isinstance(action.help, Rare):
            super().add_argument(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # names have hyphens

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if sys.version_info >= (3, 13) or len(action.option_strings) < 2 or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class _FormatterOfLines(_Formatter, argparse.RawDescriptionHelpFormatter):
    """A layout that keeps the lines of the description."""


class _HelpAll(argparse.Action):
    """Print the help with all options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser._print_message(help_of_all(parser), sys.stdout)
        parser.exit()


def help_of_all(parser: argparse.ArgumentParser) -> str:
    """Return the text of `--help-all`, or of `--help` for a command that has no more options."""
    parser.shows_all = True  # type: ignore[attr-defined]
    try:
        return parser.format_help()
    finally:
        parser.shows_all = False  # type: ignore[attr-defined]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are InputErrors. `examples` are lines before the list of commands."""

    def __init__(self, *, examples: str = "", **options: Any) -> None:
        super().__init__(formatter_class=_FormatterOfLines if examples else _Formatter, allow_abbrev=False, **options)
        self.description = examples or self.description

    shows_all = False  # in `format_help`

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter = super()._get_formatter()
        formatter.shows_all = self.shows_all  # type: ignore[attr-defined]
        return formatter

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


def add_model_arguments(
    parser: argparse.ArgumentParser, *names: str, note: str, of_files: Callable[[Add], object]
) -> Callable[..., argparse.Action]:
    """Add the arguments that all model commands share, and return the `add_argument` of their group.

    Args:
        names: the name or flags of the argument that takes the model.
        note: what to append to the help of that argument.
        of_files: adds the arguments for models that are single files.
    """
    add = parser.add_argument_group("model").add_argument
    add(*names, metavar="MODEL", help=f"bundled name, folder, file or hub id{note}")
    of_files(add)
    add("--revision", help=Rare("branch, tag or commit of a hub model"))
    add("--variant", help=Rare("weight file variant, such as fp16"))
    add("--device", type=device, default=defaults.DEVICE, help=f"{DEVICES} (default: {defaults.DEVICE})")
    return add


def add_config_argument(add: Add) -> None:
    """Add `--config` for a model that is a single file to the group of the model's."""
    add("--config", metavar="FOLDER", help=Rare("of configs, for a file of another size"))


def add_file_arguments(add: Add) -> None:
    """Add the arguments for models that are single files to the group of the model's."""
    add_config_argument(add)
    add("--vae", metavar="FILE", help="safetensors file with another VAE")
    choices = get_args(PredictionType)
    add("--prediction-type", choices=choices, metavar="NAME", help=Rare(f"of a file: {' or '.join(choices)}"))


def add_drawing_arguments(add: Callable[..., argparse.Action]) -> None:
    """Add the arguments for the model's dtype, precision and offloading to its group."""
    dtypes = f"{', '.join(DTYPES)} (default: {defaults.DTYPE}, bfloat16 on a GPU)"
    add("--dtype", choices=DTYPES, metavar="NAME", help=dtypes)
    weights = f"weights: {', '.join(PRECISIONS)} (default: {defaults.PRECISION}); 8 bits halve the memory"
    add("--precision", choices=PRECISIONS, metavar="NAME", help=weights)
    add("--offload", action="store_true", help="keep each part on the GPU only while it runs: less memory")


def add_picture_arguments(parser: argparse.ArgumentParser, labels: str, prompts: str, pictures: str) -> None:
    """Add the arguments that say what to draw and how.

    `labels`, `prompts` and `pictures` are the defaults that the help shows for labels, prompts and `--num-images`.
    """
    parser.usage = f"{parser.prog} [options]"  # argparse's own has ten lines
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options and exit")
    add = parser.add_argument_group("what to draw").add_argument
    add("--prompt", action="append", metavar="TEXT", help=f"text; may be repeated (default: {prompts})")
    add("--prompt-file", metavar="FILE", help="text file of more prompts, one per line; blank lines are skipped")
    add("--negative-prompt", metavar="TEXT", help="text that the pictures should avoid")
    add("--styles", metavar="FILE", help="styles.csv of A1111: columns name, prompt, negative_prompt")
    add("--style", action="append", metavar="NAME", help="style in FILE that changes each prompt; may be repeated")
    embedding = "textual inversion; may be repeated (default TOKEN: the file's)"
    add("--embedding", action="append", metavar="FILE[:TOKEN]", help=embedding)
    lora = "LoRA; may be repeated (default WEIGHT: 1)"
    add("--lora", action="append", metavar="FILE[:WEIGHT]", help=lora)
    add("--init-image", metavar="FILE", help="picture to start from, which the prompt changes: image to image")
    add("--strength", type=float, metavar="X", help="how much of it changes, 0 to 1 (default: 0.8; SDXL 0.3; masks 1)")
    _add_mask_arguments(add)
    _add_upscale_arguments(add)
    _add_control_arguments(add)
    _add_ip_adapter_arguments(add)
    add("--label", action="append", help=f"name or index; may be repeated (default: {labels})")
    add("--num-images", type=int, metavar="N", help=f"per label or prompt (default: {pictures})")
    seeds = f"first seed, list such as 1,2,5-10, or random, also -1 (default: {defaults.SEED})"
    add("-s", "--seed", help=seeds)
    sides = "(default: of --init-image or --control-image, else the model's)"
    for side in ("height", "width"):
        add(f"--{side}", type=int, metavar="PIXELS", help=sides)
    add("--horizon", type=int, metavar="N", help=Rare("positions of a trajectory, where models plan them"))
    add("--from", dest="source", metavar="FILE.png", help="reuse its settings; other flags override them")
    add("--models-dir", metavar="DIR", help=Rare(f"--from looks here for models (${VARIABLE})"))
    for kind in ("embedding", "lora"):
        add(f"--{kind}-dir", metavar="DIR", help=Rare(f"--from looks here for --{kind}"))
    add("--input-dir", metavar="DIR", help=Rare("--from looks here for the pictures that were given"))
    _add_sampling_arguments(parser)


def _add_mask_arguments(add: Add) -> None:
    add("--mask", metavar="FILE", help="paint --init-image anew where this picture is white: inpainting")
    blur = "blur the mask, which moves its edge (default: 0)"
    add("--mask-blur", type=float, metavar="RADIUS", help=Rare(blur))
    crop = "draw only the part around the mask, with this margin, and put it back"
    add("--mask-crop", type=int, metavar="PIXELS", help=Rare(crop))


def _add_upscale_arguments(add: Add) -> None:
    larger = f"draw, enlarge so many times, 1 to {MAX_UPSCALE}, and go on from there"
    add("--upscale", type=float, metavar="X", help=larger)
    strength = f"how much the enlarged picture changes, 0 to 1 (default: {defaults.UPSCALE_STRENGTH})"
    add("--upscale-strength", type=float, metavar="X", help=Rare(strength))
    modes = get_args(UpscaleMode)
    latent = f"enlarge {' or '.join(modes)}, which wants a strength of 0.55 to 0.7 (default: {defaults.UPSCALE_MODE})"
    add("--upscale-mode", choices=modes, metavar="NAME", help=Rare(latent))


def _add_control_arguments(add: Add) -> None:
    net = "ControlNet: folder, file, name or hub id[:PLACE]; may be repeated"
    add("--control", action="append", metavar="NAME", help=net)
    add("--control-image", action="append", metavar="FILE", help="picture that it reads, such as edges; one for each")
    scale = "how much it counts; one number, or one for each (default: 1)"
    add("--control-scale", action="append", type=float, metavar="X", help=Rare(scale))
    for side, default in (("start", 0), ("end", 1)):
        part = f"{side} of the part of the steps in which it counts, 0 to 1 (default: {default})"
        add(f"--control-{side}", action="append", type=float, metavar="X", help=Rare(part))
    guess = "follow the control picture more than the prompt"
    add("--guess-mode", action="store_true", default=None, help=Rare(guess))


def _add_ip_adapter_arguments(add: Add) -> None:
    adapter = "IP-Adapter: file, or NAME:FILE of a hub id; may be repeated"
    add("--ip-adapter", action="append", metavar="FILE", help=adapter)
    add("--ip-adapter-image", action="append", metavar="FILE", help="picture that it reads beside the prompt")
    scale = "how much it counts; one number, or one for each (default: 1)"
    add("--ip-adapter-scale", action="append", type=float, metavar="X", help=Rare(scale))
    encoder = "folder, or NAME:FOLDER of a hub model (default: image_encoder beside the first --ip-adapter)"
    add("--image-encoder", metavar="FOLDER", help=Rare(encoder))


def add_scheduler_argument(add: Callable[..., argparse.Action]) -> None:
    """Add `--scheduler`, whose names the help lists once."""
    names = f"{', '.join(SCHEDULERS)} (default: the model's own)"
    add("--scheduler", choices=SCHEDULERS, metavar="NAME", help=names)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    steps = f"denoising steps (default: the model's own, else {defaults.STEPS})"
    add("--steps", dest="num_inference_steps", type=int, metavar="N", help=steps)
    add("--num-inference-steps", type=int, help=argparse.SUPPRESS)  # diffusers' name
    add_scheduler_argument(add)
    noisy = " and ".join(name.upper() for name in ETAS)
    eta = f"noise of {noisy} steps, 0 to 1 (default: the model's, else {defaults.ETA:g})"
    add("--eta", type=float, metavar="X", help=Rare(eta))
    guidance = "guidance scale; 1 is no guidance (default: the model's own, else 1)"
    add("--cfg-scale", dest="guidance_scale", type=float, metavar="X", help=guidance)
    add("--guidance", "--guidance-scale", dest="guidance_scale", type=float, help=argparse.SUPPRESS)
    for side, default in (("start", 0), ("stop", 1)):
        part = f"{side} of the part of the steps that is guided, 0 to 1 (default: {default})"
        add(f"--guidance-{side}", type=float, metavar="X", help=Rare(part))
    syntax = f"how to read prompts: {' or '.join(SYNTAXES)}, as A1111: (word:1.2) (default: {SYNTAX})"
    add("--prompt-syntax", choices=SYNTAXES, metavar="NAME", help=Rare(syntax))
    norms = f'of weighted prompts: {" or ".join(EMPHASES)}, A1111\'s "No norm" (default: {EMPHASIS})'
    add("--emphasis", choices=EMPHASES, metavar="NAME", help=Rare(norms))
    add("--clip-skip", type=int, metavar="N", help=Rare("skip the last N layers of the text encoder (default: 0)"))


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


def sizes(text: str) -> list[tuple[int, int]]:
    """Parse sizes such as 512x512,1024x768."""
    found = []
    for size in text.split(","):
        width, cross, height = size.partition("x")
        if not (cross and width.isdecimal() and height.isdecimal()):
            raise argparse.ArgumentTypeError(f"{size!r} is not a size such as 1024x1024")
        found.append((int(width), int(height)))
    return found


def batches(text: str) -> tuple[int, ...]:
    """Parse batches such as 1,4."""
    return tuple(count(batch) for batch in text.split(","))

"""`fastdiff completion`: print a script that completes commands, flags, names and files in a shell."""

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastdiff.cli.streams import require_stdout

SHELLS = ("bash", "zsh", "fish")
CONTROL = "control"
MODELS = {"model"}  # what a flag takes, by the name in the parsed arguments
FILES = {"prompt_file", "styles", "source", "spec", "file", "auth", "grid", "out", "vae"}
FILES |= {"embedding", "lora", "init_image", "mask", "control_image", "ip_adapter", "ip_adapter_image"}
FOLDERS = {"config", "models_dir", "embedding_dir", "lora_dir", "input_dir", "outputs", "preview_vae", "folder"}
FOLDERS |= {"image_encoder"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    parser.epilog = "In bash: source <(fastdiff completion bash)"


def run(args: argparse.Namespace) -> int:
    """Print the script of the shell."""
    require_stdout()
    import shtab

    for action in _actions(args.parser):
        if (candidates := _candidates(action)) is not None:
            action.complete = candidates  # type: ignore[attr-defined]  # shtab reads it
    print(shtab.complete(args.parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of the parser and of all its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


def _candidates(action: argparse.Action) -> Mapping[str, Any] | None:
    """Return what shtab offers for the argument: models, files or folders. None: its choices."""
    import shtab

    if action.dest in MODELS or action.dest == CONTROL:
        return _names_folders_and_files(of_controlnets=action.dest == CONTROL)
    if action.dest in FOLDERS:
        return shtab.DIRECTORY
    takes_a_file = action.dest in FILES or (action.dest == "json" and action.nargs != 0)
    return shtab.FILE if takes_a_file else None


def _names_folders_and_files(*, of_controlnets: bool) -> Mapping[str, Any]:
    """Return the bundled and cached models or ControlNets, folders and single files.

    The names are written into the script, so that the Tab key starts no Python.
    """
    from fastdiff.checkpoints.hub import bundled_controlnets, bundled_models
    from fastdiff.checkpoints.single_files.listing import cached_controlnets, cached_models

    models, nets = (bundled_models, cached_models), (bundled_controlnets, cached_controlnets)
    found = [name for listed in (nets if of_controlnets else models) for name in listed()]
    function = "_fastdiff_controlnets" if of_controlnets else "_fastdiff_models"
    names = " ".join(name for name in found if re.fullmatch(r"[\w./-]+", name, re.ASCII))
    bash = f"""\
{function}() {{
  compgen -W "{names}" -- "$1"
  compgen -d -- "$1"
  compgen -f -X '!*.safetensors' -- "$1"
  compgen -f -X '!*.sft' -- "$1"
}}"""
    zsh = f"""\
{function}() {{
  compadd -- {names}
  _files -g '*.(safetensors|sft)'
}}"""
    return {
        "bash": function,
        "zsh": function,
        "fish": f"{names} (__fish_complete_suffix .safetensors)",
        "preamble": {"bash": bash, "zsh": zsh},
    }

"""`fastdiff models`: list the models that are here, or show one model's labels, prompts and defaults."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdiff.adapters.headers import describe
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import UNET_CONDITION, controlnet_class, controlnets_below
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.cards import FileOptions, file_card, names_file
from fastdiff.checkpoints.single_files.listing import (
    VARIABLE,
    cached_controlnets,
    cached_models,
    find_models,
    models_folder,
)
from fastdiff.checkpoints.single_files.reading import is_single_file
from fastdiff.cli.arguments import add_file_arguments
from fastdiff.cli.streams import printable, require_stdout
from fastdiff.errors import InputError, in_one_line
from fastdiff.refused import REFUSED_CLASSES

CONTROLNETS = "ControlNets, which draw with a model that reads prompts:"  # a heading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="NAME", help="show this model's labels, example prompts and defaults"
    )
    add_file_arguments(parser.add_argument)
    parser.add_argument("--models-dir", metavar="DIR", help=f"also list the models in DIR (default: ${VARIABLE})")
    for kind, word in (("lora", "LoRAs"), ("embedding", "embeddings")):
        parser.add_argument(f"--{kind}-dir", metavar="DIR", help=f"also list the {word} in DIR")


def run(args: argparse.Namespace) -> int:
    """Print the list or the model. InputError for a model that does not exist."""
    require_stdout()
    options = FileOptions(args.config, args.vae, args.prediction_type)
    if args.model is None and options != FileOptions():
        raise InputError("--config, --vae, --prediction-type: they are for one file; give its NAME too")
    if args.model is None:
        _list_models(_folders(args))
    elif names_file(args.model, options):
        _show_model(file_card(args.model, options))
    elif (folder := _controlnet(args.model)) is not None:
        print(printable(f"{args.model}: {_controlnet_summary(folder)}"))
    elif args.vae is not None:
        raise InputError(f"--vae: it changes nothing that is shown of {args.model}; leave it out")
    else:
        _show_model(ModelCard.read(args.model, hub.resolve(args.model, local_files_only=True)))
    return 0


def _controlnet(name: str) -> Path | None:
    """Return the folder of a ControlNet, bundled or in the cache of the hub. None if there is none of this name."""
    cached = cached_controlnets() if hub.is_hub_id(name) else {}  # the hub's client is slow to import
    return (hub.bundled_controlnets() | cached).get(name)


def _folders(args: argparse.Namespace) -> list[Path]:
    """Return the folders of the user. InputError for one that does not exist."""
    found = [models_folder(args.models_dir)]
    for word, folder in (("lora", args.lora_dir), ("embedding", args.embedding_dir)):
        if folder is not None and not os.path.isdir(folder):
            raise InputError(f"--{word}-dir: {folder} is not a folder; give the folder that contains your {word}s")
        found.append(None if folder is None else Path(folder))
    return [folder for folder in found if folder is not None]


def _list_models(mine: Sequence[Path]) -> None:
    for origin, found in (("bundled", hub.bundled_models()), ("cached", cached_models())):
        for name, folder in found.items():
            print(printable(f"{name:<40} {origin:<8} {_summary(name, folder)}"))
    for path in dict.fromkeys(path for folder in mine for path in find_models(folder)):
        origin = "folder" if path.is_dir() else "file"
        print(printable(f"{path!s:<40} {origin:<8} {_summary(str(path), path)}"))
    print(CONTROLNETS)
    for origin, found in (("bundled", hub.bundled_controlnets()), ("cached", cached_controlnets())):
        for name, folder in found.items():
            print(printable(f"{name:<40} {origin:<8} {_controlnet_summary(folder)}"))


def _show_model(card: ModelCard) -> None:
    print(printable(f"{card.name}: {_described(card)}"))
    for name, value in vars(card.info).items():
        if name not in ("labels", "label_groups", "replaced_labels", "prompts") and value is not None:
            print(f"{name}: {value}")
    for prompt in card.info.prompts:
        print(printable(f"prompt  {prompt}"))
    for label in card.labels:
        print(printable(f"{label:>5}  {card.label_name(label)}"))
    for group, names in card.info.label_groups.items():
        print(printable(f"group  {group}: {', '.join(names)}"))


def _summary(name: str, folder: Path) -> str:
    try:
        if is_single_file(folder):
            return describe(folder).summary
        return _described(ModelCard.read(name, folder))
    except InputError as error:
        return f"unusable: {error}"
    except Exception as error:  # one broken model must not hide the others
        return f"unusable: {in_one_line(error)}"


def _controlnet_summary(folder: Path) -> str:
    """Return what a ControlNet reads, and the models with the U-Net that it was made from; of several the names."""
    class_name = controlnet_class(folder)
    if class_name is None:
        return f"ControlNets in its folders {', '.join(controlnets_below(folder))}"
    if class_name in REFUSED_CLASSES:
        return f"unusable: {class_name}: {REFUSED_CLASSES[class_name]}"
    path = folder / "config.json"
    try:
        config = ControlNetConfig.from_mapping(read_json(path), path)
    except InputError as error:
        return f"unusable: {error}"
    unets = {name: place / UNET_CONDITION.name / "config.json" for name, place in hub.bundled_models().items()}
    models = [
        name
        for name, unet in unets.items()
        if unet.is_file() and _encoder(read_json(unet)) == _encoder(read_json(path))
    ]
    width = config.cross_attention_dim
    models = models or [kinds.BY_CONTEXT.get(width, f"a model that reads text of width {width}")]
    return f"ControlNet for {', '.join(models)}, reads pictures of {config.conditioning_channels} channels"


def _encoder(config: Mapping[str, Any]) -> list[Any]:
    names = ("in_channels", "block_out_channels", "layers_per_block", "cross_attention_dim")
    return [config.get(name) for name in names]


def _described(card: ModelCard) -> str:
    size = "x".join(map(str, card.size)) if card.size else "any size"
    if card.config.of_trajectories:
        size = f"trajectories of {card.config.in_channels} channels, horizon {card.horizon or 'any'}"
    example = f', such as "{card.info.prompts[0]}"' if card.info.prompts else ""
    subject = f"draws from prompts{example}" if card.reads_text else f"{len(card.labels) or 'no'} labels"
    return f"{size}, {card.scheduler or 'no scheduler'}, {subject}"

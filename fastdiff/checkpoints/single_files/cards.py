"""The ModelCard of a model that is a single file: its weights, and the configs of a folder beside them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastdiff.arguments import shown
from fastdiff.checkpoints import hub, registry
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.reading import SingleFile, is_single_file, read_single_file
from fastdiff.checkpoints.weight_files import InFile
from fastdiff.errors import InputError
from fastdiff.kinds import PredictionType
from fastdiff.schema import checked

CONFIGS = Path(__file__).parent / "configs"
BASE_STEP = 875_000  # the training steps of SD 2-base, which predicts the noise

_FOLDERS = {kinds.SD1: "sd1", kinds.SDXL: "sdxl", kinds.REFINER: "sdxl-refiner"}
_FOLDERS_OF_INPAINTING = {kinds.SD1: "sd1-inpainting", kinds.SD2: "sd2-inpainting", kinds.SDXL: "sdxl-inpainting"}
_FOLDERS_OF_SD2: dict[PredictionType, str] = {"epsilon": "sd2-base", "v_prediction": "sd2-v"}
_ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}  # Lin et al. 2024, arXiv 2305.08891
_WITHOUT_ZERO_SNR, _WITH_ZERO_SNR = "PNDMScheduler", "DDIMScheduler"


@dataclass(frozen=True)
class FileOptions:
    """How to read a single file. None leaves a choice to the file."""

    config: str | Path | None = None  # a folder in diffusers' layout, whose configs replace fastdiff's
    vae: str | Path | None = None  # a single file with another VAE; also for a model folder
    prediction_type: PredictionType | None = None
    ema: bool = False  # take the moving averages of the U-Net's weights


NOTHING = FileOptions()
NO_PARTS: Mapping[str, Any] = MappingProxyType({})


def find_card(
    name: str, options: FileOptions = NOTHING, *, revision: str | None = None, variant: str | None = None
) -> ModelCard:
    """Return the card of a model: a single file, or whatever `hub.resolve` finds. Raises InputError as it does."""
    if names_file(name, options, revision=revision, variant=variant):
        return file_card(name, options)
    card = ModelCard.read(name, hub.resolve(name, revision=revision, variant=variant))
    return card if options.vae is None else replace(card, weights={registry.VAE.name: _vae_of(card, options.vae)})


def names_file(
    name: str, options: FileOptions = NOTHING, *, revision: str | None = None, variant: str | None = None
) -> bool:
    """Return whether a model is a single file. Raises InputError for options that files or other models lack."""
    is_file = is_single_file(name)
    given: dict[str, Any] = {"revision": revision, "variant": variant}
    own = {"config": options.config, "prediction-type": options.prediction_type}
    wrong = next((each for each, value in (given if is_file else own).items() if value is not None), None)
    if wrong is not None and is_file:
        raise InputError(f"{wrong}: {given[wrong]!r} is given for {name}, but a single file has none; leave it out")
    if wrong is not None:
        raise InputError(f"{wrong}: it is for single files, and {name} is none; leave it out")
    return is_file


def file_card(
    path: str | Path, options: FileOptions = NOTHING, given: Mapping[str, Any] = NO_PARTS, name: str | None = None
) -> ModelCard:
    """Return the card of a single file. Nothing but headers and configs is read.

    Args:
        path: a safetensors file with a U-Net and, unless they are given, the other parts.
        options: how to read it.
        given: the configs of parts that replace the file's, by name; see `ModelCard.read`.
        name: the card's name. Default: the path.

    Raises:
        InputError: for a file that fastdiff cannot load, and for parts that are missing.
    """
    file = read_single_file(path)
    file.check()
    checked("prediction-type", options.prediction_type, PredictionType | None)
    name = str(path) if name is None else name
    changes, guess = _scheduler_changes(file, options, name)
    folder = _configs(file, options, changes.get("prediction_type"))
    card = ModelCard.read(name, folder, given)
    stray = sorted(file.parts.keys() - {part.name for part in card.pipeline.parts})
    if stray or not card.reads_text:
        raise InputError(
            f"{path} is a {file.kind}, but {folder} holds the configs of a {card.pipeline.name}; give another config"
        )
    own = read_json(hub.component_folder(folder, registry.SCHEDULER.name) / "scheduler_config.json")
    if file.has_zero_snr and own.get("_class_name") == _WITHOUT_ZERO_SNR and registry.SCHEDULER.name not in given:
        changes["_class_name"] = _WITH_ZERO_SNR
    scheduler = "ddim" if "_class_name" in changes else card.scheduler
    weights = _weights(file, card, options, given)
    return replace(card, weights=weights, scheduler=scheduler, scheduler_changes=changes, guess=guess)


def place_of_part(
    path: str | Path, part: registry.ModelPart, config: str | Path | None = None, *, ema: bool = False
) -> tuple[Path, InFile]:
    """Return the folder of the config of one part, and where the part's weights are in a single file.

    config: the part's folder or a pipeline's. Default: fastdiff's own. A VAE alone gets the config of SD 1's.
    Raises InputError for a file without the part, and if its size needs a `config`.
    """
    file = read_single_file(path)
    inside = file.part(part.name, ema=ema)
    if config is not None:
        return hub.component_folder(config, part.name), inside
    base = file.base or (kinds.SD1 if part.name == registry.VAE.name else file.encoders_base)
    if base is None:
        raise InputError(f"{path} is a {file.kind}; give the folder of its config as config")
    return _own_configs(file, base) / part.name, inside


def guessed_prediction(file: SingleFile) -> PredictionType:
    """Return what a file of SD 2 probably predicts, as diffusers guesses it: SD 2-base has 875,000 training steps.

    The published model for inpainting was made of SD 2-base.
    """
    return "epsilon" if file.inpaints or file.global_step() == BASE_STEP else "v_prediction"


def _scheduler_changes(file: SingleFile, options: FileOptions, name: str) -> tuple[dict[str, Any], str | None]:
    """Return the options of the scheduler that the file decides, and a line about a guess or a contradiction."""
    changes: dict[str, Any] = dict(_ZERO_SNR) if file.has_zero_snr else {}
    stated = file.stated_prediction()
    prediction, guess = options.prediction_type or stated, None
    if stated not in (None, prediction):
        guess = f"{name} says that it predicts {stated}; --prediction-type overrides it: {prediction}"
    if prediction is None and file.base == kinds.SD2 and options.config is None:
        prediction = guessed_prediction(file)
        guess = (
            f"{name} does not say what it predicts; {prediction} is a guess: if pictures are noise, give "
            "--prediction-type (prediction_type in Python)"
        )
    return changes | ({} if prediction is None else {"prediction_type": prediction}), guess


def _configs(file: SingleFile, options: FileOptions, prediction: PredictionType | None) -> Path:
    """Return the folder of the configs for a file."""
    if options.config is not None:
        folder = Path(options.config)
        if not (folder / "model_index.json").is_file():
            raise InputError(f"config: {folder} has no model_index.json; give a pipeline folder in diffusers' layout")
        return folder
    if registry.UNET_CONDITION.name not in file.parts:
        raise InputError(f"{file.path} is a {file.kind}, without a U-Net that draws; {kinds.HOLDS}")
    if file.base is None:
        raise InputError(f"{file.path} is a {file.kind}; give the folder of its configs as config")
    return _own_configs(file, file.base, prediction)


def _own_configs(file: SingleFile, base: str, prediction: PredictionType | None = None) -> Path:
    """Return the folder of fastdiff's configs for a file of a base model."""
    if file.inpaints:
        return CONFIGS / _FOLDERS_OF_INPAINTING[base]
    return CONFIGS / (_FOLDERS_OF_SD2[prediction or "v_prediction"] if base == kinds.SD2 else _FOLDERS[base])


def _weights(file: SingleFile, card: ModelCard, options: FileOptions, given: Mapping[str, Any]) -> dict[str, InFile]:
    """Return the place of each part's weights. Raises InputError for a part that is nowhere."""
    parts = [part for part in (card.denoiser, *card.pipeline.companions) if isinstance(part, registry.ModelPart)]
    wanted = [part.name for part in parts if part.name in card.classes and part.name not in given]
    weights = {name: file.part(name, ema=options.ema and name == card.denoiser.name) for name in file.parts}
    if options.vae is not None:
        weights[registry.VAE.name] = _vae_of(card, options.vae)
    missing = [name for name in wanted if name not in weights]
    if missing == [registry.VAE.name]:
        raise InputError(f"{file.path} holds no VAE; give a file that does with --vae (vae in Python)")
    if missing:
        raise InputError(
            f"{file.path} is a {file.kind}, without {' and '.join(missing)}; give a whole checkpoint, or in Python "
            "the missing parts as arguments of from_single_file"
        )
    return {name: weights[name] for name in wanted}


def _vae_of(card: ModelCard, path: str | Path) -> InFile:
    """Return the place of the VAE in a single file. Raises InputError for a file or a pipeline without a VAE."""
    if registry.VAE.name not in card.classes:
        raise InputError(f"vae: {card.name} has no VAE to replace; leave it out")
    if os.path.isdir(path):
        raise InputError(f"vae: {shown(str(path))} is a folder; give a safetensors file")
    return read_single_file(path).part(registry.VAE.name)

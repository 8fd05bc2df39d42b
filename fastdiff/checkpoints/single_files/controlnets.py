"""ControlNets in single files: what the names and shapes of their tensors tell, and their configs. Imports no torch."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastdiff.arguments import naming, shown
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.registry import CONTROLNET
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.cards import CONFIGS
from fastdiff.checkpoints.single_files.keys import shapes_of, sources
from fastdiff.checkpoints.single_files.reading import SHOWN, SingleFile, recognised, text_width
from fastdiff.checkpoints.weight_files import Header, InFile, Shapes
from fastdiff.errors import InputError
from fastdiff.refused import REFUSED_CLASSES

HOLDS = f"give a ControlNet of {', '.join(kinds.BASES[:-1])} or XL"

_FOLDERS = {kinds.SD1: "sd1-controlnet", kinds.SD2: "sd2-controlnet", kinds.SDXL: "sdxl-controlnet"}
_MARKS = (  # (layout, prefix, a key after it)
    (kinds.LDM_CONTROLNET, "control_model.", "input_hint_block.0.weight"),
    (kinds.LDM_CONTROLNET, "", "input_hint_block.0.weight"),
    (kinds.CONTROLNET_OF_DIFFUSERS, "", "controlnet_cond_embedding.conv_in.weight"),
)
_OF_SDXL = ("label_emb.", "add_embedding.")  # a ControlNet of SDXL without attention has these layers still
# A pattern of keys -> what such a file is, for ControlNets that fastdiff does not load
_REFUSED = {
    r"^(?:task_embedding$|control_add_embedding\.|spatial_ch_projs\.|transformer_layes\.)": (
        f"a ControlNetUnionModel: {REFUSED_CLASSES['ControlNetUnionModel']}"
    ),
    r"^lora_controlnet$": f"a Control-LoRA: {kinds.OTHER}; {HOLDS}",
    r"^lllite_": f"a ControlLLLite: {kinds.OTHER}; {HOLDS}",
    r"^difference$": f"a ControlNet that is stored as differences from its base model: {kinds.OTHER}; {HOLDS}",
    r"motion_modules\.": f"a ControlNet of AnimateDiff: {kinds.OTHER}; {HOLDS}",
    r"^controlnet_(?:blocks|single_blocks|x_embedder|mode_embedder)\b": (
        f"a ControlNet of another model family, such as Flux or Stable Diffusion 3; {HOLDS}"
    ),
}


class ControlPlace(NamedTuple):
    """Where a ControlNet of a single file is."""

    inside: InFile
    folder: Path  # of its config.json
    options: Mapping[str, Any]  # which override the config


def local_control_file(name: str | Path) -> Path:
    """Return the file of a ControlNet: a file, or NAME:FILE, a file in a folder or hub model, which is downloaded.

    A config.json beside a file of the hub comes with it. Raises InputError if there is no such file, and for any error
    of the hub.
    """
    root, inside = hub.parts_of(str(name))
    if os.path.isfile(name) or not (os.path.isdir(root) or hub.is_hub_id(root)):
        root, inside = "", str(name)
    with naming("control"):
        files = [inside, Path(inside).with_name("config.json").as_posix()]
        path = Path(hub.folder_with(root, files) if root else "", inside)
    if not path.is_file():
        raise InputError(f"control {shown(str(name))} does not exist; give a file or a folder")
    return path


def control_file(path: Path, header: Header) -> SingleFile:
    """Return what a file holds as a ControlNet. Its refusal says why fastdiff cannot load one from it.

    Raises InputError for an unknown file.
    """
    tensors = header.tensors
    for pattern, what in _REFUSED.items():
        if any(re.search(pattern, key) for key in tensors):
            return SingleFile(path, kinds.A_CONTROLNET, None, {}, header, f"is {what}")
    found = next(((layout, prefix) for layout, prefix, key in _MARKS if prefix + key in tensors), None)
    if found is None:
        return _no_controlnet(path, header)
    layout, prefix = found
    width = text_width(prefix, tensors)
    base = kinds.BY_CONTEXT.get(width or 0)
    if width is None and any(key.removeprefix(prefix).startswith(_OF_SDXL) for key in tensors):
        base = kinds.SDXL
    base = base if base in _FOLDERS else None
    kind = f"ControlNet of {base or 'an unknown size'}"
    return SingleFile(path, kind, base, {CONTROLNET.name: InFile(path, layout, prefix)}, header)


def _no_controlnet(path: Path, header: Header) -> SingleFile:
    """Return what a file without a ControlNet is, refused."""
    try:
        other = recognised(path, header)
    except InputError:
        keys = ", ".join(map(shown, list(header.tensors)[:SHOWN])) or "none"
        raise InputError(
            f"{path} holds no ControlNet that fastdiff knows; its tensors are {keys}...; {HOLDS}"
        ) from None
    if other.kind == kinds.A_CONTROLNET:
        reason = f"is {other.kind}: {kinds.CHANGES}, and it lacks the layers that read control pictures; {HOLDS}"
    else:
        reason = f"is {other.kind if other.refusal else f'a {other.kind}'}, not a ControlNet; {HOLDS}"
    return SingleFile(path, other.kind, other.base, {}, header, reason)


def control_place(file: SingleFile, config: str | Path | None = None, *, ema: bool = False) -> ControlPlace:
    """Return where the ControlNet of a file is, and its config.

    Args:
        file: what `control_file` returned.
        config: the folder of its config, or of a pipeline that has one. Default: a config.json beside a file in
            diffusers' layout, else fastdiff's own for the base model, with the options that the shapes tell.
        ema: whether to take moving averages of the weights.

    Raises InputError for a file that fastdiff cannot load, and if its size needs a `config`.
    """
    inside = file.part(CONTROLNET.name, ema=ema)
    if config is not None:
        return ControlPlace(inside, hub.component_folder(config, CONTROLNET.name), {})
    if inside.layout == kinds.CONTROLNET_OF_DIFFUSERS and _has_config(file.path.parent):
        return ControlPlace(inside, file.path.parent, {})
    if file.base is None:
        raise InputError(
            f"{file.path} is a {file.kind}; give the folder of its config as config to ControlNetModel.from_single_file"
        )
    folder = CONFIGS / _FOLDERS[file.base]
    own = ControlNetConfig.from_mapping(read_json(folder / "config.json"), folder)
    stored = {key: tensor.shape for key, tensor in file.header.tensors.items()}
    return ControlPlace(inside, folder, _options(own, shapes_of(sources(inside, stored, own), stored)))


def _has_config(folder: Path) -> bool:
    """Return whether a folder holds the config of a ControlNetModel."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("_class_name") == CONTROLNET.class_name


def _options(own: ControlNetConfig, shapes: Shapes) -> dict[str, Any]:
    """Return the options in which ControlNets of one base model differ, by the shapes of their tensors."""
    options: dict[str, Any] = {}
    channels = shapes.get("controlnet_cond_embedding.conv_in.weight", ())[1:2]
    options |= {"conditioning_channels": channels[0]} if channels else {}
    if not any(key.startswith("mid_block.attentions.") for key in shapes):
        options["mid_block_type"] = "UNetMidBlock2D"
    depths = [_depth(f"down_blocks.{i}.", shapes) for i in range(len(own.block_out_channels))]
    types = ["DownBlock2D" if depth is None else "CrossAttnDownBlock2D" for depth in depths]
    if depths[-1] is None:  # the last entry is also the middle's
        depths[-1] = _depth("mid_block.", shapes)
    layers = [1 if depth is None else depth for depth in depths]
    return options | {"down_block_types": types, "transformer_layers_per_block": layers}


def _depth(block: str, shapes: Shapes) -> int | None:
    """Return the number of transformer blocks in a row in a block. None if it has no attention."""
    start = f"{block}attentions.0."
    inside = [key.removeprefix(start).split(".") for key in shapes if key.startswith(start)]
    return len({parts[1] for parts in inside if parts[0] == "transformer_blocks"}) if inside else None

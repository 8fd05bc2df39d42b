"""The ControlNets of a run: where they are, and their weights. Imports no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from fastdiff.arguments import did_you_mean, naming, shown
from fastdiff.checkpoints import hub, weight_files
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_hash import begin_sha256
from fastdiff.checkpoints.registry import CONTROLNET
from fastdiff.checkpoints.single_files.controlnets import control_file, control_place, local_control_file
from fastdiff.checkpoints.single_files.reading import checked_header, is_pickle, is_single_file
from fastdiff.errors import InputError
from fastdiff.refused import REFUSED_CLASSES
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request

CONTROL_HASHES = "control_hashes"  # the setting with the hashes of the weights in a PNG


def check_controlnets(request: Request) -> None:
    """Raise InputError for a ControlNet that is nowhere, or something else. One of the hub is downloaded."""
    for name in request.control:
        find_controlnet(name, request.variant)


def find_controlnet(name: str, variant: str | None = None) -> Path:
    """Return the folder or the file of a ControlNet. One of the hub is downloaded. Raises as `check_controlnets`.

    name: of a folder or file, a bundled name, a hub id, or NAME:PLACE, a folder or file in a hub model or folder.
    """
    named = f"control {shown(name)}"
    if is_single_file(name):
        path = local_control_file(name)
        if not is_pickle(path):  # torch reads pickles
            control_place(control_file(path, checked_header(path)))
        return path
    bundled, (root, inside) = hub.bundled_controlnets(), hub.parts_of(name)
    if not (os.path.isdir(Path(root, inside)) or hub.is_hub_id(root) or name in bundled):
        remedy = did_you_mean(name, bundled) or f"give a folder, a hub id org/name, or {', '.join(bundled)}"
        raise InputError(f"{named} does not exist; {remedy}")
    with naming("control"):
        folder = hub.resolve_part(name, CONTROLNET, variant=variant)
        class_name = read_json(folder / "config.json").get("_class_name")
    if class_name in REFUSED_CLASSES:
        raise InputError(f"{named} is a {class_name}: {REFUSED_CLASSES[class_name]}")
    if class_name != CONTROLNET.class_name:
        raise InputError(f"{named} is a {class_name}; give a {CONTROLNET.class_name}")
    return folder


def weights_of_controlnets(request: Request) -> list[list[Path]]:
    """Return the files of weights of each ControlNet of a request. Raises InputError if there are none."""
    places = [find_controlnet(name, request.variant) for name in request.control]
    found = [[place] if place.is_file() else weight_files.find(place, request.variant) for place in places]
    return [[each if isinstance(each, Path) else each.path for each in files] for files in found]


def changed_controlnets(source: Recorded, request: Request) -> Iterator[str]:
    """Yield a line for each ControlNet of the PNG whose weights have another hash now."""
    names, digits = (source.settings.get(key) or () for key in ("control", CONTROL_HASHES))
    known = dict(zip(names, digits, strict=False))
    for name, paths in zip(request.control, weights_of_controlnets(request), strict=True):
        if name in known and (now := begin_sha256(paths).result()) != known[name]:
            yield (
                f"{name} has the ControlNet hash {now[:10]}, and {source.path} was drawn with {known[name][:10]}; the "
                "picture will differ"
            )

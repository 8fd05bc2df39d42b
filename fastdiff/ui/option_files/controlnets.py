"""The ControlNets that the page offers for a model. Only configs and headers are read.

A user gives names alone. A name that is not in the list opens no folder and no file.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdiff.arguments import shown
from fastdiff.checkpoints import hub, weight_files
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import state_of
from fastdiff.checkpoints.registry import CONTROLNET
from fastdiff.checkpoints.single_files.controlnets import control_file, control_place
from fastdiff.checkpoints.single_files.listing import last_part
from fastdiff.checkpoints.single_files.reading import checked_header
from fastdiff.errors import InputError, in_one_line
from fastdiff.requests.request import Request
from fastdiff.ui.option_files.offered import find_offered

MOST_NAMES = 8  # in a message
# settings of a picture on the page, of which a PNG lists one for each ControlNet
OF_EACH = ("control", "control_image", "control_scale", "control_start", "control_end")
OF_CONTROL = (*OF_EACH, "guess_mode")
OTHERS = "other_controls"  # beside them: the names of further ControlNets, which the page has no fields for


class ControlNets:
    """The ControlNets on offer, by name."""

    def __init__(self, find: Callable[[], Mapping[str, Path]], *, allow_hub: bool = False) -> None:
        """find: returns folders, and files that may be ControlNets. allow_hub: whether a user may give a hub id too."""
        self.allow_hub = allow_hub
        self._find = find
        self._names: dict[str, str] = {}  # of the places that requests have chosen
        self._configs: dict[object, ControlNetConfig | str] = {}  # or what is wrong, by the state of the files

    def offered(self, card: ModelCard) -> dict[str, Path]:
        """Return the folders and files of the ControlNets that fit a model, by name."""
        if not can_be_controlled(card):
            return {}
        return {name: place for name, place in self._find().items() if self._misfit(place, card) is None}

    def names(self) -> set[str]:
        """Return the names of all ControlNets, whether or not they fit a model."""
        return {name for name, place in self._find().items() if not isinstance(self._config(place), str)}

    def _config(self, place: Path) -> ControlNetConfig | str:
        """Return the config of a ControlNet, or what is wrong with it. A header is read again only when it changes."""
        try:
            key = state_of(place if place.is_file() else place / "config.json")
            if key not in self._configs:
                self._configs[key] = _read_config(place)
            return self._configs[key]
        except Exception as error:  # one broken ControlNet must not hide the others
            return in_one_line(error)

    def _misfit(self, place: Path, card: ModelCard) -> str | None:
        """Return why a ControlNet does not fit a model, or None if it does."""
        config = self._config(place)
        if isinstance(config, str):
            return config
        assert isinstance(card.config, UNet2DConditionConfig)  # the callers ask `can_be_controlled`
        try:
            config.check_fit(card.config, card.scale)
        except InputError as error:
            return str(error)
        return None

    def chosen(self, name: str, card: ModelCard) -> Path:
        """Return the folder or the file of a ControlNet. One of the hub is downloaded if the hub is allowed.

        Raises InputError for a name that is not on offer for the model.
        """
        offered = self.offered(card)
        place = offered.get(name)
        if place is None and self.allow_hub and hub.is_hub_id(name) and can_be_controlled(card):
            place = hub.resolve_part(name, CONTROLNET)
            if misfit := self._misfit(place, card):
                raise InputError(f"control: {shown(name)} does not fit {card.name}: {misfit}")
        if place is None:
            some = f"one of {', '.join([*offered][:MOST_NAMES])}" if offered else "none: there is none for this model"
            raise InputError(f"control: {shown(name)} is not on offer for {card.name}; choose {some}")
        self._names[str(place)] = name
        return place

    def with_names(self, request: Request) -> Request:
        """Return a request of the page with its ControlNets by their names, as its PNG stores them."""
        return replace(request, control=tuple(self._names.get(each, each) for each in request.control))

    def record_with_names(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a picture, with its ControlNets by name."""
        if "control" not in record:
            return dict(record)
        return {**record, "control": [self._names.get(each, each) for each in record["control"]]}

    def without_paths(self, text: str, request: Request) -> str:
        """Return an error's text with the ControlNets of a request by name."""
        for each in request.control:
            text = text.replace(each, self._names.get(each, each))
        return text

    def here(self, record: Mapping[str, Any], source: str, card: ModelCard) -> tuple[dict[str, Any], list[str]]:
        """Return the settings of the PNG `source` with the ControlNet that is here, and lines about others.

        record: as `one_control` returns it. As a LoRA, a ControlNet is found by its name, else by its hash, else by the
        last part of its name.
        """
        others = record.get(OTHERS) or ()
        lines = [_one_alone(others)] if others else []
        if record.get("control") is None:
            return dict(record), lines
        files = {name: _weights(place) for name, place in self.offered(card).items()}
        name, line = find_offered("ControlNet", record["control"], record.get("control_hash"), files, source)
        if name is None and self.allow_hub and hub.is_hub_id(record["control"]):
            name, line = record["control"], None
        missing = dict.fromkeys(OF_CONTROL) if name is None else {"control": name}
        return {**record, **missing}, [*filter(None, [line]), *lines]


def can_be_controlled(card: ModelCard) -> bool:
    """Return whether a model is of a kind that ControlNets guide."""
    return card.reads_text and isinstance(card.config, UNet2DConditionConfig)


def one_control(request: Request, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the first ControlNet of a PNG, one value for each of OF_CONTROL, and the OTHERS.

    request: of the PNG's settings. Without a ControlNet, the result is empty.
    """
    if not request.control:
        return {}
    first = {name: next(iter(getattr(request, name)), None) for name in OF_EACH}
    hashes = {name: _first(record.get(f"{name}es")) for name in ("control_image_hash", "control_hash")}
    others = [last_part(name) for name in request.control[1:]]
    return first | hashes | {"guess_mode": request.guess_mode, OTHERS: others}


def _first(listed: Any) -> str | None:
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else None


def _one_alone(others: list[str]) -> str:
    return f"not restored: {' and '.join(others)}, because the page draws with one ControlNet"


def _read_config(place: Path) -> ControlNetConfig | str:
    """Return the config of a ControlNet, or why the folder or the file has none."""
    try:
        if not place.is_file():
            return ControlNetConfig.from_mapping(read_json(place / "config.json"), place.name)
        at = control_place(control_file(place, checked_header(place)))
        return ControlNetConfig.from_mapping({**read_json(at.folder / "config.json"), **at.options}, place.name)
    except InputError as error:
        return str(error)


def _weights(place: Path) -> Path:
    """Return the file of weights, whose hash a PNG holds. Several have the folder instead, which has no hash."""
    try:
        files = [] if place.is_file() else weight_files.find(place, None)
    except InputError:
        return place
    return files[0].path if len(files) == 1 else place

"""The ControlNets of the catalogue that fit a model. Only configs and headers are read."""

from collections.abc import Callable, Mapping
from pathlib import Path

from fastdiff.checkpoints import hub, weight_files
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import state_of
from fastdiff.checkpoints.registry import CONTROLNET
from fastdiff.checkpoints.single_files.controlnets import control_file, control_place
from fastdiff.checkpoints.single_files.reading import checked_header
from fastdiff.errors import InputError, in_one_line
from fastdiff.hosting.catalogue.picture_readers import PictureReaders


class ControlNets(PictureReaders):
    """The ControlNets on offer, by name: folders and files."""

    SETTING, WHAT = "control", "ControlNet"
    OF_EACH = ("control", "control_image", "control_scale", "control_start", "control_end")
    OF_ALL = ("guess_mode",)

    def __init__(self, find: Callable[[], Mapping[str, Path]], *, allow_hub: bool = False) -> None:
        super().__init__(find, allow_hub=allow_hub)
        self._configs: dict[object, ControlNetConfig | str] = {}  # or what is wrong, by the state of the files

    @staticmethod
    def suits(card: ModelCard) -> bool:
        return card.reads_text and isinstance(card.config, UNet2DConditionConfig)

    def names(self) -> set[str]:
        """Return the names of all ControlNets, also of those that fit no model."""
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

    def _misfit(self, name: str, place: Path, card: ModelCard) -> str | None:
        config = self._config(place)
        if isinstance(config, str):
            return config
        assert isinstance(card.config, UNet2DConditionConfig)  # guaranteed by `suits`
        try:
            config.check_fit(card.config, card.scale)
        except InputError as error:
            return str(error)
        return None

    def _is_of_hub(self, name: str) -> bool:
        return hub.is_hub_id(name)

    def _downloaded(self, name: str) -> Path | None:
        return hub.resolve_part(name, CONTROLNET)

    def _hashed(self, place: Path) -> Path:
        try:
            files = [] if place.is_file() else weight_files.find(place, None)
        except InputError:
            return place
        return files[0].path if len(files) == 1 else place


def _read_config(place: Path) -> ControlNetConfig | str:
    """Return the config of a ControlNet, or why the folder or the file has none."""
    try:
        if not place.is_file():
            return ControlNetConfig.from_mapping(read_json(place / "config.json"), place.name)
        at = control_place(control_file(place, checked_header(place)))
        return ControlNetConfig.from_mapping({**read_json(at.folder / "config.json"), **at.options}, place.name)
    except InputError as error:
        return str(error)

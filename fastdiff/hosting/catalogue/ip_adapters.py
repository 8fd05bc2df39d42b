"""The IP-Adapters on offer: files of the catalogue that fit a model and have an image encoder.

Only headers and configs are read.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.configs.clip import CLIPVisionConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import state_of
from fastdiff.checkpoints.registry import IMAGE_ENCODER
from fastdiff.checkpoints.single_files.ip_adapter_sizes import IPAdapterSizes, is_ip_adapter, sizes_of
from fastdiff.checkpoints.single_files.ip_adapters import find_image_encoder, find_ip_adapter, image_encoder_weights
from fastdiff.checkpoints.single_files.listing import last_part
from fastdiff.checkpoints.single_files.reading import checked_header
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue.offered import other_file
from fastdiff.hosting.catalogue.picture_readers import PictureReaders
from fastdiff.requests.request import Request

ENCODER = "image_encoder"  # a setting
ENCODER_HASH = "image_encoder_hash"  # beside the settings: of its weights, as the PNG has it


class IPAdapters(PictureReaders):
    """The IP-Adapters on offer, by name: safetensors files."""

    SETTING, WHAT = "ip_adapter", "IP-Adapter"
    OF_EACH = ("ip_adapter", "ip_adapter_image", "ip_adapter_scale")

    def __init__(
        self,
        find: Callable[[], Mapping[str, Path]],
        find_encoders: Callable[[Path], Iterable[tuple[str, Path]]],
        *,
        allow_hub: bool = False,
    ) -> None:
        """find: returns files that may be IP-Adapters. find_encoders: returns the names and the folders of the image
        encoders that a file may use, the one beside it first.
        """
        super().__init__(find, allow_hub=allow_hub)
        self._find_encoders = find_encoders
        # by the name and the state of the file; what is wrong with an IP-Adapter, or None for another file
        self._read: dict[object, IPAdapterSizes | str | None] = {}
        self._configs: dict[object, CLIPVisionConfig | None] = {}  # by the state of the file; None: it is not one

    @staticmethod
    def suits(card: ModelCard) -> bool:
        config = card.config
        return card.reads_text and isinstance(config, UNet2DConditionConfig) and config.encoder_hid_dim_type is None

    def reasons(self) -> dict[str, str | None]:
        """Return why each IP-Adapter cannot be used with any model, by name; None for one that can be."""
        found = {name: (place, self._sizes(name, place)) for name, place in self._find().items()}
        return {
            name: sizes if isinstance(sizes, str) else self._without_encoder(name, place, sizes)
            for name, (place, sizes) in found.items()
            if sizes is not None
        }

    def _sizes(self, name: str, place: Path) -> IPAdapterSizes | str | None:
        """Return the sizes of an IP-Adapter, or what is wrong with it. A header is read again only when it changes."""
        try:
            key = name, state_of(place)
            if key not in self._read:
                self._read[key] = _read_sizes(name, place)
            return self._read[key]
        except OSError:  # it is gone
            return None

    def _misfit(self, name: str, place: Path, card: ModelCard) -> str | None:
        sizes = self._sizes(name, place)
        if not isinstance(sizes, IPAdapterSizes):
            return sizes or f"{name} is no safetensors file of an IP-Adapter"
        assert isinstance(card.config, UNet2DConditionConfig)  # guaranteed by `suits`
        try:
            sizes.check_model(card.config)
        except InputError as error:
            return str(error)
        return self._without_encoder(name, place, sizes)

    def _without_encoder(self, name: str, place: Path, sizes: IPAdapterSizes) -> str | None:
        """Return a line if an IP-Adapter has no image encoder, or None."""
        if self._encoder(place, sizes) is not None:
            return None
        return f"{name} has no image encoder: the folder image_encoder beside it is missing, or does not fit it"

    def _encoder(self, place: Path, sizes: IPAdapterSizes) -> Path | None:
        """Return the folder of the image encoder that an IP-Adapter reads: the one beside it, or else another one."""
        for name, folder in self._find_encoders(place):
            if self._fits(folder, sizes):
                self._names[str(folder)] = name
                return folder
        return None

    def _fits(self, folder: Path, sizes: IPAdapterSizes) -> bool:
        """Return whether a folder has the image encoder that an IP-Adapter was trained with, by their widths."""
        config = self._config(folder)
        try:
            if config is None or not image_encoder_weights(folder):
                return False
            sizes.check_encoder(config)
        except InputError:
            return False
        return True

    def _config(self, folder: Path) -> CLIPVisionConfig | None:
        try:
            key = state_of(folder / "config.json")
            if key not in self._configs:
                self._configs[key] = _read_config(folder)
            return self._configs[key]
        except OSError:  # there is none
            return None

    def _refusal(self, name: str, card: ModelCard, offered: Any) -> str:
        place = self._find().get(name) if self.suits(card) else None
        if place is not None and self._sizes(name, place) is not None:
            return self._misfit(name, place, card) or f"{name} has changed; choose it again"
        return super()._refusal(name, card, offered)

    def _is_of_hub(self, name: str) -> bool:
        root, _, inside = name.partition(":")
        path = PurePosixPath(inside)
        return hub.names_hub_file(root) and bool(path.name) and not path.is_absolute() and ".." not in path.parts

    def _downloaded(self, name: str) -> Path | None:
        place = find_ip_adapter(name)
        with contextlib.suppress(InputError):  # another image encoder may fit
            find_image_encoder(name, None)
        return place

    def _hashed(self, place: Path) -> Path:
        return place

    def fields(self, name: str, card: ModelCard) -> dict[str, Any]:
        place = self.chosen(name, card)
        sizes = self._sizes(name, place)
        encoder = self._encoder(place, sizes) if isinstance(sizes, IPAdapterSizes) else None
        other = None if encoder in (None, place.parent / IMAGE_ENCODER.name) else str(encoder)
        return {self.SETTING: (str(place),), ENCODER: other}

    def check(self, request: Request) -> None:
        """Raise InputError if an IP-Adapter of a request, or its image encoder, is gone."""
        for place in request.ip_adapter:
            try:
                image_encoder_weights(find_image_encoder(find_ip_adapter(place).as_posix(), request.image_encoder))
            except InputError:
                gone = f"{self._named(place)} or its image encoder is gone"
                raise InputError(f"{gone}; reload the page, and choose another file") from None

    def with_names(self, request: Request) -> Request:
        named = super().with_names(request)
        return named if named.image_encoder is None else replace(named, image_encoder=self._named(named.image_encoder))

    def record_with_names(self, record: Mapping[str, Any]) -> dict[str, Any]:
        encoder = {ENCODER: self._named(record[ENCODER])} if record.get(ENCODER) else {}
        return super().record_with_names(record) | encoder

    @classmethod
    def first(cls, request: Request, record: Mapping[str, Any]) -> dict[str, Any]:
        digits = {ENCODER_HASH: record[ENCODER_HASH]} if isinstance(record.get(ENCODER_HASH), str) else {}
        found = super().first(request, record)
        return found | digits if found else {}

    @classmethod
    def _others(cls, request: Request) -> str | None:
        more = request.ip_adapter_image[1:] if len(request.ip_adapter) == 1 else ()
        names = " and ".join(map(last_part, more))
        return f"{names}, because the page draws with one image prompt" if more else super()._others(request)

    def here(self, record: Mapping[str, Any], source: str, card: ModelCard) -> tuple[dict[str, Any], list[str]]:
        found, lines = super().here(record, source, card)
        place = self.offered(card).get(str(found.get(self.SETTING)))
        sizes = None if place is None else self._sizes(found[self.SETTING], place)
        encoder = self._encoder(place, sizes) if place and isinstance(sizes, IPAdapterSizes) else None
        weights = [] if encoder is None else image_encoder_weights(encoder)
        if len(weights) == 1:
            what = f"the image encoder of {found[self.SETTING]}"
            lines += filter(None, [other_file(what, weights[0], record.get(ENCODER_HASH), source)])
        return found, lines


def _read_sizes(name: str, place: Path) -> IPAdapterSizes | str | None:
    """Return the sizes of an IP-Adapter, what is wrong with it, or None for another file."""
    try:
        shapes = {key: tensor.shape for key, tensor in checked_header(place).tensors.items()}
    except InputError:  # the catalogue of models names it
        return None
    if not is_ip_adapter(shapes):
        return None
    try:
        return sizes_of(name, shapes)
    except InputError as error:
        return str(error)


def _read_config(folder: Path) -> CLIPVisionConfig | None:
    try:
        return CLIPVisionConfig.from_mapping(read_json(folder / "config.json"), folder.name)
    except InputError:
        return None

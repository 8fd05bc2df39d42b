"""Find the files of IP-Adapters and of their image encoder: in folders, on the hub, or given as they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastdiff.arguments import optional, shown, text
from fastdiff.checkpoints import hub
from fastdiff.errors import InputError
from fastdiff.models.clip_vision import CLIPVisionModelWithProjection
from fastdiff.models.unet2d_condition import UNet2DConditionModel

ENCODER_FOLDER = "image_encoder"


class Place(NamedTuple):
    """The place of an IP-Adapter."""

    given: Any
    subfolder: str | None
    weight_name: str | None

    @property
    def is_on_hub(self) -> bool:
        return isinstance(self.given, str) and hub.names_hub_file(self.given)

    def local(self, client: Mapping[str, Any]) -> Any:
        """Return the file, or a dict unchanged. A file on the hub is downloaded."""
        if isinstance(self.given, Mapping):
            return self.given
        if not isinstance(self.given, str | Path):
            raise InputError(f"IP-Adapter: {shown(self.given)} is neither a file, a folder nor a dict; give one")
        path = Path(self.given)
        if path.is_file():
            return path
        if self.weight_name is None:
            raise InputError(f"weight_name: missing; give the name of the IP-Adapter's file in {self.given}")
        inside = Path(self.subfolder or "", self.weight_name)
        if self.is_on_hub:
            return hub.hub_file(str(self.given), inside.as_posix(), **client)
        if not (path / inside).is_file():
            raise InputError(f"{path / inside} does not exist; give the file of an IP-Adapter")
        return path / inside

    def load_encoder(
        self, folder: str, client: Mapping[str, Any], unet: UNet2DConditionModel
    ) -> CLIPVisionModelWithProjection:
        """Load the image encoder of an IP-Adapter in the U-Net's dtype."""
        if isinstance(self.given, Mapping):
            raise InputError("image_encoder_folder: a dict has none; give None, and set pipe.image_encoder")
        inside = folder if "/" in folder else Path(self.subfolder or "", folder).as_posix()
        load = CLIPVisionModelWithProjection.from_pretrained
        if self.is_on_hub:
            return load(str(self.given), subfolder=inside, dtype=unet.dtype, device=unet.device, **client)
        path = Path(self.given)
        place = path.parent / folder if path.is_file() else path / inside
        if not place.is_dir():
            raise InputError(
                f"image_encoder_folder: {place} does not exist; give the folder of the image encoder, or None to set "
                "pipe.image_encoder yourself"
            )
        return load(place, dtype=unet.dtype, device=unet.device)


def ip_adapter_places(given: Any, subfolder: Any, weight_name: Any) -> list[Place]:
    """Return the place of each IP-Adapter. A single entry of an argument is for all of them, as in diffusers."""
    sources = list(given) if isinstance(given, list | tuple) else [given]
    folders, names = _texts("subfolder", subfolder), _texts("weight_name", weight_name)
    count = max(len(sources), len(names))
    lists = {"pretrained_model_name_or_path_or_dict": sources, "subfolder": folders, "weight_name": names}
    for name, values in lists.items():
        if len(values) not in (1, count):
            raise InputError(f"{name}: {len(values)} given for {count} IP-Adapters; give one, or one for each")
    repeated = [values * count if len(values) == 1 else values for values in lists.values()]
    return [Place(*each) for each in zip(*repeated, strict=True)]


def _texts(name: str, given: Any) -> list[str | None]:
    values = list(given) if isinstance(given, list | tuple) else [given]
    return [optional(text, name, value) or None for value in values]

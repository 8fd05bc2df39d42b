"""Find IP-Adapters and their image encoder by the names that a request gives. Imports no torch.

An IP-Adapter is a file, or NAME:FILE, a file in a folder or hub model: `h94/IP-Adapter:models/ip-adapter_sd15.bin`. Its
image encoder is in the folder `image_encoder` beside it, unless the request names another folder in the same way.
"""

import os
from pathlib import Path, PurePosixPath

from fastdiff.arguments import naming, shown
from fastdiff.checkpoints import hub, weight_files
from fastdiff.checkpoints.registry import IMAGE_ENCODER
from fastdiff.errors import InputError

_EXAMPLE = "h94/IP-Adapter:models/ip-adapter_sd15.safetensors"
_ENCODER_EXAMPLE = "h94/IP-Adapter:models/image_encoder"


def find_ip_adapter(name: str) -> Path:
    """Return the file of an IP-Adapter. A file on the hub is downloaded.

    Raises InputError if there is none, and for any error of the hub.
    """
    named = f"ip-adapter {shown(name)}"
    if os.path.isfile(name):
        return Path(name)
    root, inside = hub.parts_of(name)
    if not _is_place(root):
        raise InputError(f"{named} does not exist; give a file, or one on the hub as {_EXAMPLE}")
    if not inside:
        raise InputError(f"{named} names no file; give one as NAME:FILE, such as {_EXAMPLE}")
    with naming("ip-adapter"):
        folder = hub.folder_with(root, [inside])
    if not os.path.isfile(folder / inside):
        raise InputError(f"{named}: {root} has no file {shown(inside)}; give another one")
    return folder / inside


def find_image_encoder(ip_adapter: str, name: str | None) -> Path:
    """Return the folder of the image encoder of an IP-Adapter: the folder `name`, or else the one beside its file.

    A folder on the hub is downloaded. Raises InputError if there is no image encoder in it, and as `find_ip_adapter`.
    """
    if name is None:
        root, inside = _beside(ip_adapter)
        missing = f"ip-adapter {shown(ip_adapter)}: there is no image encoder in {{}}"
        missing += f"; give its folder with --image-encoder, such as {_ENCODER_EXAMPLE}"
    else:
        root, inside = hub.parts_of(name)
        missing = f"image-encoder {shown(name)}: there is no image encoder in {{}}; give its folder"
        if not _is_place(root):
            raise InputError(f"image-encoder {shown(name)} does not exist; give a folder, or {_ENCODER_EXAMPLE}")
    if not os.path.isdir(root) and hub.is_hub_id(root):
        with naming("image-encoder"):
            return hub.resolve_part(root, IMAGE_ENCODER, inside or None)
    folder = Path(root, inside)
    folder = hub.component_folder(folder, IMAGE_ENCODER.name) if name is not None else folder
    if not os.path.isfile(folder / "config.json"):
        raise InputError(missing.format(folder))
    return folder


def image_encoder_weights(folder: Path) -> list[Path]:
    """Return the files of weights of an image encoder. Raises InputError if there are none."""
    return [file.path for file in weight_files.find(folder, None, IMAGE_ENCODER.library)]


def _beside(ip_adapter: str) -> tuple[str, str]:
    """Return the folder or hub id of an IP-Adapter's image encoder, and its place in it."""
    if os.path.isfile(ip_adapter):
        return str(Path(ip_adapter).parent / IMAGE_ENCODER.name), ""
    root, inside = hub.parts_of(ip_adapter)
    return root, (PurePosixPath(inside).parent / IMAGE_ENCODER.name).as_posix()


def _is_place(root: str) -> bool:
    return os.path.isdir(root) or hub.names_hub_file(root)

"""The pictures that a run starts from: files of the user, read within bounds. Imports no torch, and PIL when needed."""

import functools
import hashlib
import io
import os
import stat
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_SIDE
from fastdiff.requests.png import read_input
from fastdiff.requests.request import CONTROL_SETTINGS, IP_ADAPTER_SETTINGS, Request

if TYPE_CHECKING:
    from PIL.Image import Image

INIT_IMAGE, MASK = "init-image", "mask"  # the flags of the two, and their names inside a PNG
CONTROL = "control-image"  # the flag of a picture that a ControlNet reads
IMAGE_PROMPT = "ip-adapter-image"  # the flag of a picture that an IP-Adapter reads
MAX_BYTES = 2**28  # of a file
_UNSAFE = ("EPS",)  # PIL runs another program, Ghostscript, to read it
_ORIENTATION, _TURNED = 0x0112, range(5, 9)  # EXIF's tag, and its values for pictures that lie on their side


@dataclass(frozen=True)
class InputPicture:
    """A picture in a file of the user, or inside a PNG of fastdiff."""

    name: str  # the path, as the user gave it
    sha256: str  # of the file's bytes
    size: tuple[int, int]  # (height, width), upright
    setting: str = INIT_IMAGE  # for messages: the flag, or the column of a spec
    inside: str | None = None  # the PNG that has the file's bytes
    stored: str = INIT_IMAGE  # their name there

    @classmethod
    def read(
        cls,
        name: str,
        setting: str = INIT_IMAGE,
        *,
        inside: str | None = None,
        stored: str | None = None,
        pixels: bool = True,
    ) -> "InputPicture":
        """Read a picture; `pixels`: also decode it. Raises InputError, which names the file, if it is no picture.

        stored: the name in the PNG `inside`, by default the setting.
        """
        stored = stored or setting
        data = _read(name, setting, inside, stored)
        picture = _decoded(data, f"{setting} {shown(name)}", pixels=pixels)
        height, width = picture.height, picture.width
        if picture.getexif().get(_ORIENTATION) in _TURNED:
            height, width = width, height
        return cls(name, hashlib.sha256(data).hexdigest(), (height, width), setting, inside, stored)

    def data(self) -> bytes:
        """Return the bytes of the file. Raises InputError if they have changed since `read`."""
        data = _read(self.name, self.setting, self.inside, self.stored)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise InputError(f"{self.setting} {shown(self.name)} has changed since the run began; start again")
        return data

    def open(self) -> "Image":
        """Return the picture as PIL reads it, of any mode. Raises as `data`."""
        return _opened(self)

    def brightest(self) -> int:
        """Return the largest grey level in the picture, 0 to 255. Transparency does not count."""
        image = self.open()
        if image.mode == "LAB" or isinstance(image.info.get("transparency"), bytes):
            image = image.convert("RGBA").convert("RGB")
        _, most = image.convert("L").getextrema()
        assert isinstance(most, int)  # of an image with several bands it is a pair
        return most


@dataclass(frozen=True)
class Mask:
    """Where a picture changes, in white: inpainting."""

    picture: InputPicture
    blur: float = 0.0  # radius in pixels
    crop: int | None = None  # only the part around the mask is drawn, with a margin of so many pixels

    def as_identity(self) -> dict[str, Any]:
        """Return the settings in a PNG that the drawn picture depends on."""
        blur = {"mask_blur": self.blur} if self.blur else {}
        crop = {"mask_crop": self.crop} if self.crop is not None else {}
        return {"mask_hash": self.picture.sha256, **blur, **crop}


@dataclass(frozen=True)
class Start:
    """A picture to start from, and how much of it changes: image to image, or inpainting with a mask."""

    picture: InputPicture
    strength: float
    mask: Mask | None = None

    def as_record(self) -> dict[str, Any]:
        """Return its settings in a PNG."""
        mask = {} if self.mask is None else {"mask": self.mask.picture.name}
        return {"init_image": self.picture.name, **mask, **self.as_identity()}

    def as_identity(self) -> dict[str, Any]:
        """Return the settings in a PNG that the drawn picture depends on."""
        mask = {} if self.mask is None else self.mask.as_identity()
        return {"init_image_hash": self.picture.sha256, "strength": self.strength, **mask}

    @property
    def pictures(self) -> list[InputPicture]:
        """The picture, and the mask if there is one."""
        return [self.picture] if self.mask is None else [self.picture, self.mask.picture]

    @property
    def alike(self) -> tuple[Any, ...]:
        """Return what the starts of one call have in common."""
        mask = self.mask
        if mask is None:
            return self.strength, None
        return self.strength, mask.blur, mask.crop, None if mask.crop is None else (self.picture, mask.picture)


@dataclass(frozen=True)
class _Listed:
    """Pictures that networks beside the model read."""

    pictures: tuple[InputPicture, ...]
    setting: ClassVar[str]

    def as_record(self) -> dict[str, Any]:
        """Return its settings in a PNG."""
        return {self.setting: [picture.name for picture in self.pictures], **self.as_identity()}

    def as_identity(self) -> dict[str, Any]:
        """Return the settings in a PNG that the drawn picture depends on."""
        return {f"{self.setting}_hashes": [picture.sha256 for picture in self.pictures]}


class Control(_Listed):
    """The pictures that ControlNets read, one for each."""

    setting = "control_image"


class ImagePrompt(_Listed):
    """The pictures that IP-Adapters read: all for a single IP-Adapter, or one for each."""

    setting = "ip_adapter_image"


class ImagesOfEach(tuple[Any, ...]):
    """Image prompts, one for each drawn picture, as an argument of the library. Equal ones are one object."""


def stored_name(flag: str, place: int) -> str:
    """Return the name inside a PNG of a picture whose flag is repeated, by its place among them."""
    return f"{flag}-{place + 1}" if place else flag


def read_control(request: Request) -> Control | None:
    """Read the control pictures of a request. Raises InputError, also unless each ControlNet has one."""
    names, count = request.control_image, len(request.control)
    if names and not count:
        raise InputError(f"{CONTROL} {shown(names[0])}: a ControlNet reads it; give --control, or leave it out")
    check_control_count(len(names), count)
    return Control(_read_all(names, request.control_image_inside, CONTROL)) if count else None


def check_control_count(found: int, wanted: int) -> None:
    """Raise InputError unless each of the ControlNets has a picture."""
    if found != wanted:
        raise InputError(f"{CONTROL}: {found} given for {wanted} --control; give one for each, in the same order")


def read_image_prompt(request: Request) -> ImagePrompt | None:
    """Read the pictures for the IP-Adapters of a request. Raises InputError, also if there are too few or too many."""
    names, count = request.ip_adapter_image, len(request.ip_adapter)
    if names and not count:
        raise InputError(
            f"{IMAGE_PROMPT} {shown(names[0])}: an IP-Adapter reads it; give --ip-adapter, or leave it out"
        )
    check_image_count(len(names), count)
    return ImagePrompt(_read_all(names, request.ip_adapter_image_inside, IMAGE_PROMPT)) if count else None


def read_listed(request: Request) -> tuple[Control | None, ImagePrompt | None]:
    """Read the pictures for the ControlNets and IP-Adapters of a request. Raises InputError."""
    return read_control(request), read_image_prompt(request)


def check_image_count(found: int, wanted: int) -> None:
    """Raise InputError unless each of the IP-Adapters has a picture. A single one reads any number of them."""
    if found != wanted and not (wanted == 1 and found):
        raise InputError(
            f"{IMAGE_PROMPT}: {found} given for {wanted} --ip-adapter; give one for each, in the same order"
        )


def _read_all(names: Sequence[str], inside: Sequence[str | None], flag: str) -> tuple[InputPicture, ...]:
    """Read the pictures of a flag that is repeated. `inside`: the PNG that holds each, or nothing."""
    return tuple(
        InputPicture.read(name, flag, inside=png, stored=stored_name(flag, i))
        for i, (name, png) in enumerate(zip(names, inside or (None,) * len(names), strict=True))
    )


def control_settings(request: Request, scale: float | None) -> dict[str, Any]:
    """Return the settings of ControlNets with every choice made.

    scale: the default; None leaves it to the pipeline, as rows of a file may have several. Raises InputError.
    """
    count = len(request.control)
    if not count:
        name = next((name for name in CONTROL_SETTINGS if getattr(request, name) not in ((), None, False)), None)
        if name is not None:
            raise InputError(f"{Request.SHOWN_AS[name]}: it is for a ControlNet; give --control, or leave it out")
        return {"guess_mode": None}
    names = "control_scale", "control_start", "control_end"
    scales, starts, ends = (_of_each(request, name, "control") for name in names)
    for first, last in zip(starts or (0.0,) * count, ends or (1.0,) * count, strict=True):
        if first >= last:
            raise InputError(f"control-end {last:g}: it is not after --control-start {first:g}; give a larger number")
    if not scales and scale is not None:
        scales = (scale,) * count
    return {
        "control_scale": scales,
        "control_start": starts if any(starts) else (),
        "control_end": ends if any(end != 1 for end in ends) else (),
        "guess_mode": request.guess_mode or None,
    }


def ip_adapter_settings(request: Request) -> dict[str, Any]:
    """Return the settings of IP-Adapters with every choice made. Raises InputError for settings without one."""
    if not request.ip_adapter:
        name = next((name for name in IP_ADAPTER_SETTINGS if getattr(request, name) not in ((), None)), None)
        if name is not None:
            raise InputError(f"{Request.SHOWN_AS[name]}: it is for an IP-Adapter; give --ip-adapter, or leave it out")
    return {"ip_adapter_scale": _of_each(request, "ip_adapter_scale", "ip_adapter") or (1.0,) * len(request.ip_adapter)}


def _of_each(request: Request, name: str, owner: str) -> tuple[float, ...]:
    """Return the numbers of a setting for each of its owners; one number is for all, and none stays none."""
    values, count = getattr(request, name), len(getattr(request, owner))
    if len(values) not in (0, 1, count):
        flag = owner.replace("_", "-")
        raise InputError(f"{Request.SHOWN_AS[name]}: {len(values)} given for {count} --{flag}; give one, or one each")
    return values * count if len(values) == 1 else values


@functools.lru_cache(maxsize=4)  # all batches of a run may start from one picture and mask
def _opened(picture: InputPicture) -> "Image":
    return _decoded(picture.data(), f"{picture.setting} {shown(picture.name)}")


def _read(name: str, setting: str, inside: str | None, stored: str) -> bytes:
    if inside is not None:
        data = read_input(inside, stored)
        if data is None:
            raise InputError(f"{inside} does not hold its picture any more; give the file with --{setting}")
        return data
    try:
        found = os.stat(name)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            raise InputError(f"{setting} {shown(name)} is not a file; give a picture")
        if found.st_size > MAX_BYTES:
            raise InputError(f"{setting} {shown(name)} has more than {MAX_BYTES >> 20} MiB; give a smaller picture")
        return Path(name).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{setting} {shown(name)} does not exist; give a picture") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, InputError):
            raise
        raise InputError(f"{setting} {shown(name)} cannot be read ({error}); give a picture") from None


def _decoded(data: bytes, name: str, *, pixels: bool = True) -> "Image":
    """Return the first picture in a file's bytes. Raises InputError, which begins with `name`, if PIL cannot read it.

    pixels: whether to decode them now.
    """
    from PIL import Image, UnidentifiedImageError

    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that are odd but readable
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=[each for each in Image.ID if each not in _UNSAFE])
            if max(image.size) > MAX_SIDE:
                raise InputError(f"{name} is {image.height} x {image.width}, and each side must be at most {MAX_SIDE}")
            if pixels:
                image.load()
            image.getexif()
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"{name} has more than {Image.MAX_IMAGE_PIXELS} pixels; make it smaller") from None
    except UnidentifiedImageError:
        raise InputError(f"{name} is not a picture that PIL reads; give a PNG, JPEG or WebP") from None
    except Exception as error:  # PIL's decoders raise anything on broken data
        told = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name}: its data cannot be read ({told}); save it again") from None
    return image

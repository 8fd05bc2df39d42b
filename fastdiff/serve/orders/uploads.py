"""The pictures of an edit: kept in a private folder while the request is drawn. A mask becomes fastdiff's."""

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastdiff.errors import InputError
from fastdiff.requests.input_picture import MASK, InputPicture
from fastdiff.serve.wire.errors import ApiError, invalid

if TYPE_CHECKING:
    from starlette.datastructures import FormData

FILES = ("image", "mask")
_LISTS = ("image[]", "loras", "loras[]")  # fields that may be given several times
_STRANGE = re.compile(r"[^\w. -]|^\.+", re.ASCII)  # characters of names that are replaced
MAX_NAME = 80  # characters


class Uploaded(NamedTuple):
    """The files of an edit."""

    image: str
    mask: str | None  # white where the picture is painted anew


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """Create a folder that no other user can read, for the block. Errors of the block name files without it."""
    folder = Path(tempfile.mkdtemp(prefix="fastdiff-serve-"))
    try:
        yield folder
    except InputError as error:
        raise InputError(str(error).replace(f"{folder}/", "").replace("given-", "")) from None
    finally:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()


def texts(form: "FormData") -> dict[str, Any]:
    """Return the fields of a form that are no files. Raises ApiError for a field given twice, and for a wrong kind."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(form.keys()):
        values, field = form.getlist(name), name.removesuffix("[]")
        is_file = [not isinstance(value, str) for value in values]
        if field in FILES:
            if not all(is_file):
                raise invalid(field, "it is a text; send a file, as curl does with -F image=@picture.png")
            continue
        if any(is_file):
            raise invalid(field[:MAX_NAME], "it is a file; send a text")
        if len(values) > 1 and name not in _LISTS:
            raise invalid(field[:MAX_NAME], "it is given twice; give it once")
        found[field if name in _LISTS else name] = [*values] if name in _LISTS else values[0]
    return found


async def read(form: "FormData") -> dict[str, tuple[str, bytes]]:
    """Return the name and the bytes of each file of a form. Raises ApiError for no image, and for several."""
    found: dict[str, tuple[str, bytes]] = {}
    for name in FILES:
        uploads = [each for each in (*form.getlist(name), *form.getlist(f"{name}[]")) if not isinstance(each, str)]
        if len(uploads) > 1:
            raise invalid(name, f"{len(uploads)} files are given; give one")
        for upload in uploads:
            found[name] = _safe(upload.filename or ""), await upload.read()
    if "image" not in found:
        raise ApiError(400, "image: it is missing; send a file", param="image", code="missing_required_parameter")
    return found


def keep(files: Mapping[str, tuple[str, bytes]], folder: Path) -> Uploaded:
    """Write the files into a folder. Raises ApiError for a mask that does not fit, and InputError for no picture."""
    name, data = files["image"]
    image = folder / name
    image.write_bytes(data)
    if "mask" not in files:
        return Uploaded(str(image), None)
    name, data = files["mask"]
    given = folder / f"given-{name}"
    given.write_bytes(data)
    mask = folder / f"mask-{Path(name).stem}.png"
    _write_mask(InputPicture.read(str(given), MASK), InputPicture.read(str(image)), mask)
    return Uploaded(str(image), str(mask))


def _write_mask(given: InputPicture, image: InputPicture, path: Path) -> None:
    """Write the mask of OpenAI's API, transparent where the picture is painted anew, as white on black."""
    picture = given.open()
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        raise invalid("mask", "it has no alpha channel; make it transparent where the picture shall be painted anew")
    if given.size != image.size:
        sizes = ["{1}x{0}".format(*each.size) for each in (given, image)]
        raise invalid("mask", f"it is {sizes[0]}, and the image is {sizes[1]}; give both the same size")
    white = picture.convert("RGBA").getchannel("A").point([255] + [0] * 255)
    if white.getextrema() == (0, 0):
        raise invalid("mask", "no pixel is transparent, so nothing would be painted anew; make some transparent")
    white.save(path)


def _safe(name: str) -> str:
    """Return the last part of a client's file name, as a name of the server: the PNG's settings record it."""
    last = re.split(r"[\\/]", name)[-1]
    return _STRANGE.sub("_", last)[-MAX_NAME:] or "image"

"""Pictures as files in memory, and as base64 in an answer."""

import base64
import io
from typing import TYPE_CHECKING, Any, NamedTuple

from fastdiff.requests import png
from fastdiff.serve.wire.fields import Fields, Format

if TYPE_CHECKING:
    from PIL.Image import Image


class Form(NamedTuple):
    """The format of the files."""

    name: Format = "png"
    quality: int = 100  # of webp and jpeg

    @classmethod
    def of(cls, fields: Fields) -> "Form":
        """Return the format that a request wants."""
        quality = 100 if fields.output_compression is None else fields.output_compression
        return cls(fields.output_format or "png", quality)


class Encoded(NamedTuple):
    """A picture of an answer."""

    base64: str
    size: tuple[int, int]  # (width, height)


def encode(image: "Image", form: Form, record: dict[str, Any] | None = None) -> Encoded:
    """Return a PIL picture as base64. A PNG has `record`, the settings, as the command writes them."""
    return Encoded(base64.b64encode(_bytes_of(image, form, record)).decode(), image.size)


def encode_preview(image: "Image", size: tuple[int, int], form: Form) -> Encoded:
    """Return a preview as base64, enlarged to the `size` (width, height) of the finished picture."""
    from PIL.Image import Resampling

    return encode(image if image.size == size else image.resize(size, Resampling.BILINEAR), form)


def _bytes_of(image: "Image", form: Form, record: dict[str, Any] | None) -> bytes:
    if form.name == "png":
        return png.encode(image, record)
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, form.name, quality=form.quality)
    return buffer.getvalue()

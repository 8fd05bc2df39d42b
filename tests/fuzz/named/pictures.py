"""Pictures of a run, sound and hostile, next to a model's files.

Runs start from them, masks are made of them, and ControlNets and IP-Adapters read them.
"""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from tests.fuzz.named import controls
from tests.fuzz.named.image_prompts import ip_adapters

NAME, MASK, CONTROL, PROMPT = "start.png", "mask.png", "control.png", "prompt.png"
_EDGES = [
    (name, value) for name in ("Low threshold", "High threshold", "Width") for value in ("0", "x", "1e400", "900")
]
SIDES = ("16", "24", "33", "1", "20000")
_ORIENTATION = 0x0112


def picture(folder: Path, form: str, height: str, width: str, name: str = NAME) -> None:
    """Write a picture of `height` x `width` pixels."""
    shape = int(height), int(width), 3
    levels = np.linspace(0, 255, int(np.prod(shape))).reshape(shape).astype(np.uint8)
    (folder / name).write_bytes(FORMS[form](Image.fromarray(levels)))


def _saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _turned(image: Image.Image, value: int) -> bytes:
    exif = Image.Exif()
    exif[_ORIENTATION] = value
    return _saved(image, "JPEG", exif=exif)


def _header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and has a few compressed zeros."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(2**20))), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


FORMS: dict[str, Callable[[Image.Image], bytes]] = {
    "RGB": _saved,
    "JPEG": lambda image: _saved(image, "JPEG"),
    "WebP": lambda image: _saved(image.resize((min(image.width, 999), min(image.height, 999))), "WEBP"),
    "grey": lambda image: _saved(image.convert("L")),
    "alpha": lambda image: _saved(image.convert("RGBA")),
    "palette": lambda image: _saved(image.quantize(7), transparency=0),
    "palette with alphas": lambda image: _saved(image.quantize(7), transparency=bytes(range(7))),
    "bits": lambda image: _saved(image.convert("1")),
    "16 bits": lambda image: _saved(Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)),
    "CMYK": lambda image: _saved(image.convert("CMYK"), "JPEG"),
    "CMYK TIFF": lambda image: _saved(image.convert("CMYK"), "TIFF"),
    "LAB": lambda image: _saved(Image.merge("LAB", image.split()), "TIFF"),
    "floats": lambda image: _saved(image.convert("F"), "TIFF"),
    "animated GIF": lambda image: _saved(image, "GIF", save_all=True, append_images=[image.rotate(180)] * 3),
    "animated PNG": lambda image: _saved(image, save_all=True, append_images=[image.rotate(180)]),
    "turned": lambda image: _turned(image, 6),
    "mirrored": lambda image: _turned(image, 7),
    "turned by nonsense": lambda image: _turned(image, 99),
    "NaN": lambda image: _saved(Image.fromarray(np.full((16, 16), np.nan, np.float32)), "TIFF"),
    "EPS": lambda image: _saved(image, "EPS"),
    "half": lambda image: _saved(image)[: len(_saved(image)) // 2],
    "half of a JPEG": lambda image: _saved(image, "JPEG")[: len(_saved(image, "JPEG")) // 2],
    "bomb": lambda image: _header(16000, 16000),
    "large bomb": lambda image: _header(2**31 - 1, 2**31 - 1),
    "no height": lambda image: _header(16, 0),
    "text": lambda image: b"no picture",
    "nothing": lambda image: b"",
    "signature": lambda image: _saved(image)[:8],
}
REFUSED = ("EPS", "half", "half of a JPEG", "bomb", "large bomb", "no height", "text", "nothing", "signature")


def must_be_refused(form: str, height: str, width: str, name: str = NAME) -> bool:
    """Return whether drawing from the picture must fail, whatever its size."""
    return form in REFUSED


@st.composite
def loaded(draw: st.DrawFn) -> tuple[Any, ...]:
    """Return the edits, the door, what to call, and the flags of a case. Half of the files are sound and small."""
    small = st.sampled_from(SIDES[:3])
    form = draw(st.sampled_from([*FORMS, *FORMS.keys() - set(REFUSED)]))
    height, width = draw(st.tuples(small, small) | st.tuples(st.sampled_from(SIDES), small))
    name = st.just(NAME)
    damage = st.one_of(
        st.tuples(st.just("flip"), name, st.integers(0, 1000).map(str), st.integers(0, 7).map(str)),
        st.tuples(st.just("truncate"), name, st.integers(0, 1000).map(str)),
        st.tuples(st.just("append"), name, st.sampled_from(["1", "1000"])),
    )
    damaged = draw(st.lists(damage, max_size=1)) if form not in REFUSED and draw(st.integers(0, 3)) == 3 else []
    if draw(st.integers(0, 3)) == 0:
        fields = draw(st.lists(st.sampled_from(_EDGES), max_size=1))
        return (("picture", form, height, width), *damaged), "tab", "start", tuple(fields)
    flags = [
        ("--init-image", f"../model/{NAME}"),
        ("--strength", draw(st.sampled_from(["1", "1", "1.0", "0.5", "nan"]))),
    ]
    flags += draw(st.sampled_from([[], [], [("--height", "16"), ("--width", "16")], [("--embed-inputs", "(alone)")]]))
    masks, more = draw(
        st.sampled_from([((), [("--upscale", "1.5")]), ((), [])]) | _masked() | _controlled() | _prompted()
    )
    return (("picture", form, height, width), *damaged, *masks), "command", "sample", (*flags, *more)


@st.composite
def _masked(draw: st.DrawFn) -> tuple[tuple[Any, ...], list[tuple[str, str]]]:
    """Return the edit and the flags of a mask."""
    form = draw(st.sampled_from([*FORMS, *FORMS.keys() - set(REFUSED)]))
    height, width = draw(st.tuples(st.sampled_from(SIDES[:3]), st.sampled_from(SIDES)))
    flags = [("--mask", f"../model/{MASK}")]
    flags += draw(
        st.sampled_from([*[[]] * 4, [("--mask-blur", "2")], [("--mask-blur", "1e9")], [("--mask-blur", "nan")]])
    )
    flags += draw(st.sampled_from([*[[]] * 4, [("--mask-crop", "4")], [("--mask-crop", "-1")], [("--upscale", "2")]]))
    return (("picture", form, height, width, MASK),), flags


@st.composite
def of_captions(draw: st.DrawFn) -> tuple[Any, ...]:
    """Return the edits and the flags of a sound start picture for Z-Image, and of a mask that may be hostile."""
    masks, flags = draw(_masked())
    start = ("--init-image", f"../model/{NAME}"), ("--strength", draw(st.sampled_from(["1", "0.5"])))
    return (("picture", "RGB", "16", "24"), *masks), (*start, *flags)


@st.composite
def _controlled(draw: st.DrawFn) -> tuple[tuple[Any, ...], list[tuple[str, str]]]:
    """Return the edits and the flags of a sound ControlNet, with a picture that may be hostile."""
    form = draw(st.sampled_from([*FORMS, *FORMS.keys() - set(REFUSED)]))
    height, width = draw(st.tuples(st.sampled_from(SIDES[:3]), st.sampled_from(SIDES)))
    flags = [("--control", f"../model/{controls.NAME}"), ("--control-image", f"../model/{CONTROL}")]
    flags += draw(
        st.sampled_from(
            [
                *[[]] * 6,
                [("--control-scale", "-1")],
                [("--control-scale", "nan")],
                [("--control-start", "0.5"), ("--control-end", "0.5")],
                [("--control-end", "0.5"), ("--guess-mode", "(alone)")],
                [("--control", f"../model/{controls.NAME}")],
                [("--control", f"../model/{CONTROL}")],
            ]
        )
    )
    return (("controlnet", "sound"), ("picture", form, height, width, CONTROL)), flags


OF_PROMPTS = (("--ip-adapter", f"../model/{ip_adapters.NAME}"), ("--ip-adapter-image", f"../model/{PROMPT}"))


@st.composite
def _prompted(draw: st.DrawFn) -> tuple[tuple[Any, ...], list[tuple[str, str]]]:
    """Return the edits and the flags of an IP-Adapter. Its picture, its file or its image encoder may be hostile."""
    pictures, files, encoders = ([*forms] for forms in (FORMS, ip_adapters.FORMS, ip_adapters.ENCODERS))
    hostile = draw(st.sampled_from(["picture", "file", "encoder", "nothing"]))
    form = draw(st.sampled_from(pictures)) if hostile == "picture" else "RGB"
    file = draw(st.sampled_from(files)) if hostile == "file" else draw(st.sampled_from([*ip_adapters.SOUND]))
    encoder = draw(st.sampled_from(encoders)) if hostile == "encoder" else "sound"
    height, width = draw(
        st.tuples(st.sampled_from(SIDES[:3]), st.sampled_from(SIDES[: 5 if hostile == "picture" else 4]))
    )
    edits = [("ip_adapter", file, draw(st.integers(0, 1000).map(str)))]
    edits += draw(st.sampled_from([*[[("image_encoder", encoder)]] * 5, []]))
    more = [
        *[[]] * 6,
        [("--ip-adapter-scale", "-1")],
        [("--ip-adapter-scale", "nan")],
        [("--ip-adapter-scale", "1e30")],
        [("--ip-adapter-image", f"../model/{PROMPT}")],
        [("--ip-adapter", f"../model/{PROMPT}")],
        [("--ip-adapter", "../model:unet/config.json"), ("--ip-adapter-image", f"../model/{PROMPT}")],
        [("--image-encoder", "../model/unet")],
        [("--image-encoder", "../model")],
        [("--image-encoder", f"../model/{PROMPT}")],
    ]
    return (*edits, ("picture", form, height, width, PROMPT)), [*OF_PROMPTS, *draw(st.sampled_from(more))]

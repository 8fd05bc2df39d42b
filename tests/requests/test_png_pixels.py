"""The pixels of a PNG: any reader accepts them, they equal the picture's pixels, and threads change no byte."""

import io
import itertools
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks.pictures.bench_png import photograph
from fastdiff.checkpoints.hub import bundled_models
from fastdiff.requests import png, png_pixels
from tests.requests.test_png import RECORD

SHAPES = [(1, 1), (1, 7), (7, 1), (3, 5), (64, 64), (33, 1031), (1000, 3), (257, 255)]  # height, width
CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


def picture(mode: str, height: int, width: int) -> Image.Image:
    """Return a picture with smooth, noisy and flat parts, so that several filters and both levels occur."""
    random = np.random.default_rng(height * width)
    shape = height, width, CHANNELS[mode]
    levels = np.add.outer(np.arange(height), np.arange(width))[..., None] + np.zeros(shape)
    levels[height // 3 :] += random.integers(0, 40, shape)[height // 3 :]
    levels[2 * height // 3 :, width // 2 :] = 255
    levels = levels.astype(np.uint8)
    return Image.fromarray(levels[..., 0] if mode == "L" else levels)


def parsed(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the chunks of a PNG. AssertionError for a wrong signature or checksum, or for bytes after the end."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = [], 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + length]
        assert data[at + 8 + length :][:4] == struct.pack(">I", zlib.crc32(kind + content))
        chunks.append((kind, content))
        at += 12 + length
    assert at == len(data) and chunks[-1] == (b"IEND", b"")
    return chunks


def unfiltered(data: bytes, height: int, width: int, channels: int) -> np.ndarray:
    """Return the levels (H, W, C) of filtered rows by the definition in the specification, one byte after the other."""
    assert len(data) == height * (1 + width * channels)
    above = bytes(width * channels)
    rows = []
    for row in range(height):
        filter_type, *residuals = data[row * (1 + len(above)) :][: 1 + len(above)]
        levels: list[int] = []
        for at, residual in enumerate(residuals):
            a = levels[at - channels] if at >= channels else 0
            b, c = above[at], above[at - channels] if at >= channels else 0
            nearest = min((a, b, c), key=lambda each: abs(a + b - c - each))
            prediction = (0, a, b, (a + b) // 2, nearest)[filter_type]
            levels.append((residual + prediction) % 256)
        above = bytes(levels)
        rows.append(levels)
    return np.array(rows, np.uint8).reshape(height, width, channels)


@pytest.mark.parametrize("mode", CHANNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("band", [1, 100, 2**20], ids=["band-each-row", "bands-shorter-than-the-window", "one-band"])
def test_pil_reads_the_same_pixels(monkeypatch, mode, shape, band):
    monkeypatch.setattr(png_pixels, "_BAND", band)
    image = picture(mode, *shape)
    data = png.encode(image)
    with Image.open(io.BytesIO(data)) as read:
        read.verify()
    with Image.open(io.BytesIO(data)) as read:
        assert read.mode == mode and read.tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", CHANNELS)
def test_a_strict_reader_finds_one_stream_and_the_pixels(monkeypatch, mode):
    monkeypatch.setattr(png_pixels, "_BAND", 500)
    image = picture(mode, 61, 43)
    (first, header), *others = parsed(png.encode(image, RECORD))
    depth_and_type = (8, {"L": 0, "LA": 4, "RGB": 2, "RGBA": 6}[mode])
    assert first == b"IHDR" and struct.unpack(">IIBBBBB", header) == (43, 61, *depth_and_type, 0, 0, 0)
    kinds = [kind for kind, _ in others]
    assert kinds == sorted(kinds, key=(b"iTXt", b"IDAT", b"IEND").index) and kinds.count(b"IDAT") > 5
    inflate = zlib.decompressobj()
    filtered = inflate.decompress(b"".join(content for kind, content in others if kind == b"IDAT"))
    assert inflate.eof and not inflate.unused_data
    levels = unfiltered(filtered, 61, 43, CHANNELS[mode])
    assert np.array_equal(levels, np.asarray(image).reshape(levels.shape))


@pytest.mark.parametrize("mode", ["1", "P", "CMYK", "P with a transparent colour"])
def test_other_pictures_are_stored_in_colour(mode):
    image = picture("RGB", 9, 14).convert(mode.partition(" ")[0])
    if "transparent" in mode:
        image.info["transparency"] = 3
    expected = image.convert("RGBA" if "transparent" in mode else "RGB")
    with Image.open(io.BytesIO(png.encode(image))) as read:
        assert read.mode == expected.mode and read.tobytes() == expected.tobytes()


def test_any_number_of_threads_gives_the_same_bytes():
    image = photograph(400, 1.0)
    expected = png_pixels.encode_pixels(image, 1)
    assert len(expected[1]) > 4
    assert all(png_pixels.encode_pixels(image, threads) == expected for threads in (2, 3, 16, None))


def test_the_texts_are_those_that_pil_writes():
    info, buffer = PngInfo(), io.BytesIO()
    image, record = picture("RGB", 4, 4), RECORD | {"label": "Wörter, 绘画 🙂 \ud800"}
    info.add_itxt("parameters", png.parameters_text(record))
    info.add_itxt("fastdiff", png.canonical_json({"schema": 1, "numerics": png.NUMERICS, **record}))
    image.save(buffer, format="PNG", pnginfo=info)
    theirs, ours = (
        [each for each in parsed(data) if each[0] != b"IDAT"] for data in (buffer.getvalue(), png.encode(image, record))
    )
    assert ours == theirs


PICTURES = [path for folder in bundled_models().values() for path in folder.rglob("*.png")]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: "-".join(path.parts[-2:]))
def test_a_bundled_picture_is_about_as_small_as_by_pil(path):
    with Image.open(path) as image:
        image.load()
        assert_small(image)


@pytest.mark.parametrize("grain", [0.0, *(pytest.param(grain, marks=pytest.mark.slow) for grain in (0.5, 2.0)), 6.0])
def test_a_photograph_is_about_as_small_as_by_pil(grain):
    assert_small(photograph(1024, grain))


def assert_small(image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    assert len(png.encode(image)) <= 1.03 * buffer.tell()


def test_paeth_is_the_nearest_neighbour():
    values = [*range(12), 100, 101, 127, 128, 129, 200, *range(244, 256)]
    a, b, c = np.array([*itertools.product(values, repeat=3)], np.uint8).T
    wide = np.stack([a, b, c]).astype(int)
    nearest = np.abs(wide[0] + wide[1] - wide[2] - wide).argmin(0)  # of equals the first: left, up, corner
    assert np.array_equal(png_pixels._paeth(a, b, c), np.choose(nearest, wide))


def test_each_row_takes_the_filter_with_the_least_residuals():
    image = np.asarray(photograph(64, 3.0)).reshape(64, -1)
    filtered = np.empty((64, 193), np.uint8)
    mean = png_pixels.filter_rows(image, slice(0, 64), 3, filtered)
    residuals = np.minimum(filtered[:, 1:], -filtered[:, 1:])
    assert mean == pytest.approx(residuals.mean())
    for kind in (1, 2, 3, 4):  # the same rows by one filter alone are not better
        left, up = np.roll(image, 3, 1).astype(int), np.roll(image, 1, 0).astype(int)
        corner = np.roll(left, 1, 0)
        prediction = (left, up, (left + up) // 2, png_pixels._paeth(*(x.astype(np.uint8) for x in (left, up, corner))))
        alone = (image - prediction[kind - 1])[1:, 3:].astype(np.uint8)
        assert residuals[1:, 3:].sum() <= np.minimum(alone, -alone).sum()

"""The pixels of a PNG: rows filtered with numpy and deflated in bands, on threads. One valid zlib stream.

PIL filters and deflates a picture on one thread and holds Python's lock. Here both release it. Where the bands lie and
how each is deflated depends on the picture alone, so any number of threads gives the same bytes. zlib itself differs
between builds of Python: the pixels are the same everywhere, the bytes where the build is the same.
"""

import struct
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fastdiff.execution.cores import num_cores

MOST_THREADS = 16
COLOUR_TYPES = {"L": 0, "LA": 4, "RGB": 2, "RGBA": 6}  # PIL's mode -> PNG specification, 11.2.1
_BAND = 96 * 2**10  # bytes of filtered rows, about: 32 bands for 1024 x 1024 RGB, an even share for 16 cores
_WINDOW = 2**15  # bytes that deflate looks back
_SUB, _UP, _AVERAGE, _PAETH = 1, 2, 3, 4  # filter types: PNG specification, 9.2
_NOISE = 1.0  # mean residual above which few long matches are left, and searching for them costs time alone


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG: its length, type, data and checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


def encode_pixels(image, threads: int | None = None) -> tuple[bytes, list[bytes]]:
    """Return the IHDR chunk of a PIL picture, and its IDAT chunks, one for each band of rows.

    A picture whose mode is not in COLOUR_TYPES is stored as RGB, or as RGBA if anything in it is transparent.

    threads: how many to use at most. Default: one for each core, up to MOST_THREADS.
    """
    if image.mode not in COLOUR_TYPES:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    rows = np.asarray(image).reshape(image.height, -1)  # (H, W C) uint8
    channels = rows.shape[1] // image.width
    bands = _bands(*rows.shape)
    filtered = np.empty((image.height, 1 + rows.shape[1]), np.uint8)  # a row begins with its filter type
    with ThreadPoolExecutor(min(threads or num_cores(), MOST_THREADS), thread_name_prefix="png") as pool:
        each: Callable[..., Iterable] = pool.map if len(bands) > 1 else map
        residuals = [*each(lambda band: filter_rows(rows, band, channels, filtered), bands)]
        data = [*each(lambda band, residual: _idat(filtered, band, residual), bands, residuals)]
    return chunk(b"IHDR", struct.pack(">IIBBBBB", *image.size, 8, COLOUR_TYPES[image.mode], 0, 0, 0)), data


def _bands(height: int, length: int) -> list[slice]:
    """Return the bands of `height` rows with `length` bytes. Only the shape decides."""
    size = max(1, round(_BAND / (1 + length)))
    return [slice(first, min(first + size, height)) for first in range(0, height, size)]


def filter_rows(rows: np.ndarray, band: slice, channels: int, filtered: np.ndarray) -> float:
    """Write the `band` of `rows` (H, W C) to `filtered` (H, 1 + W C), and return the mean absolute residual.

    Each row takes the filter with the smallest sum of absolute residuals: PNG specification, 12.7.
    """
    here = rows[band]
    up, left, corner = np.zeros_like(here), np.zeros_like(here), np.zeros_like(here)
    if band.start:
        up[0] = rows[band.start - 1]
    up[1:] = here[:-1]
    left[:, channels:], corner[:, channels:] = here[:, :-channels], up[:, :-channels]
    average = (left & up) + ((left ^ up) >> 1)  # floor of the mean, without a ninth bit
    predictions = {_SUB: left, _UP: up, _AVERAGE: average, _PAETH: _paeth(left, up, corner)}
    residuals = [here - prediction for prediction in predictions.values()]
    sums = np.stack([np.abs(each.view(np.int8)).view(np.uint8).sum(1, dtype=np.uint64) for each in residuals])
    best = sums.argmin(0)
    filtered[band, 0] = np.array([*predictions], np.uint8)[best]
    for index, residual in enumerate(residuals):
        chosen = best == index
        filtered[band, 1:][chosen] = residual[chosen]
    return float(sums.min(0).sum()) / here.size


def _paeth(left: np.ndarray, up: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """Return whichever of left, up and corner is nearest to left + up - corner, in 8 bits.

    A corner in the middle third between the neighbours is nearest itself. Otherwise the neighbour on the far side is.
    Ties fall as the specification says: PNG, 9.4.
    """
    low, high = np.minimum(left, up), np.maximum(left, up)
    below = np.maximum(corner, low) - low  # what lies between the corner and the lower neighbour
    above = high - np.minimum(corner, high)
    return _select(above <= below >> 1, low, _select(below <= above >> 1, high, corner))


def _select(mask: np.ndarray, chosen: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return np.where(mask, chosen, other) for uint8. np.where takes 20 times as long where the mask is irregular."""
    return other ^ ((chosen ^ other) & -mask.view(np.uint8))


def _idat(filtered: np.ndarray, band: slice, residual: float) -> bytes:
    """Return the IDAT chunk of a band. It ends at a byte, and refers to the 32 KiB before the band as its dictionary.

    The first band has the header of the zlib stream, and the last one has the checksum of all bands.
    """
    flat = filtered.reshape(-1).data
    start, end = band.start * filtered.shape[1], band.stop * filtered.shape[1]
    level = 6 if residual < _NOISE else 5
    dictionary = flat[max(0, start - _WINDOW) : start]
    deflate = zlib.compressobj(level, zlib.DEFLATED, -15, 9, zlib.Z_FILTERED, dictionary)
    data = deflate.compress(flat[start:end])
    if end < len(flat):
        data += deflate.flush(zlib.Z_SYNC_FLUSH)
    else:
        data += deflate.flush() + struct.pack(">I", zlib.adler32(flat))
    return chunk(b"IDAT", data if start else b"\x78\x9c" + data)

"""The formats of a shard: a folder of PNGs, a webdataset tar or an npz. Equal pictures give equal bytes."""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from fastdiff.requests import png
from fastdiff.runs.drawing import Finished

if TYPE_CHECKING:
    import numpy as np

_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest date in a zip


@dataclass(frozen=True)
class Encoded:
    """An encoded picture, ready for its file."""

    key: str
    label: int | None
    record: dict[str, Any]  # its settings
    pixels_sha256: str
    png: bytes = b""
    array: "np.ndarray | None" = None  # (H, W, C) uint8


class Form(Protocol):
    """A way to write the pictures of a shard to the path `aside`. OSError if the disk refuses."""

    def begin(self, aside: Path) -> None:
        """Create the folder to write to."""

    def encode(self, aside: Path, key: str, finished: Finished) -> Encoded:
        """Encode one picture, as far as threads can do in parallel."""
        raise NotImplementedError

    def assemble(self, aside: Path, pictures: Sequence[Encoded]) -> None:
        """Finish the file of all pictures, which are given in order."""


class PngFolder:
    """000000.png, 000001.png ..., each with its settings."""

    def begin(self, aside: Path) -> None:
        aside.mkdir(parents=True)

    def encode(self, aside: Path, key: str, finished: Finished) -> Encoded:
        data = png.encode(finished.image, finished.record)
        _write_synced(aside / f"{key}.png", data)
        return _encoded(key, finished)

    def assemble(self, aside: Path, pictures: Sequence[Encoded]) -> None:
        """Do nothing: every picture is already written."""


class Webdataset:
    """Samples of .png, .json (its settings), and .cls (the label's index) or .txt (the prompt), in order."""

    def begin(self, aside: Path) -> None:
        aside.parent.mkdir(parents=True, exist_ok=True)

    def encode(self, aside: Path, key: str, finished: Finished) -> Encoded:
        return _encoded(key, finished, png=png.encode(finished.image, finished.record))

    def assemble(self, aside: Path, pictures: Sequence[Encoded]) -> None:
        with open(aside, "xb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for picture in pictures:
                    for ending, data in self._parts(picture).items():
                        member = tarfile.TarInfo(f"{picture.key}.{ending}")
                        member.size, member.mode = len(data), 0o644
                        tar.addfile(member, io.BytesIO(data))
            _sync(file)

    @staticmethod
    def _parts(picture: Encoded) -> dict[str, bytes]:
        parts = {"png": picture.png, "json": png.canonical_json(picture.record).encode()}
        if picture.label is not None:
            parts["cls"] = str(picture.label).encode()
        if "prompt" in picture.record:
            parts["txt"] = picture.record["prompt"].encode()
        return parts


class Npz:
    """arr_0 (N, H, W, C) uint8, arr_1 (N,) int64 for labels, and settings.jsonl with a line per picture."""

    def begin(self, aside: Path) -> None:
        aside.parent.mkdir(parents=True, exist_ok=True)

    def encode(self, aside: Path, key: str, finished: Finished) -> Encoded:
        import numpy as np

        array = np.asarray(finished.image)
        return _encoded(key, finished, array=array[..., None] if array.ndim == 2 else array)

    def assemble(self, aside: Path, pictures: Sequence[Encoded]) -> None:
        import numpy as np

        labels = [picture.label for picture in pictures if picture.label is not None]
        with open(aside, "xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                first = pictures[0].array
                assert first is not None
                with _member(archive, "arr_0.npy") as member:
                    _write_header(member, (len(pictures), *first.shape), "|u1")
                    for picture in pictures:
                        assert picture.array is not None
                        member.write(picture.array.tobytes())
                if labels:
                    with _member(archive, "arr_1.npy") as member:
                        _write_header(member, (len(labels),), "<i8")
                        member.write(np.asarray(labels, "<i8").tobytes())
                with _member(archive, "settings.jsonl") as member:
                    for picture in pictures:
                        member.write(f"{json.dumps(picture.record, sort_keys=True)}\n".encode())
            _sync(file)


FORMS: dict[str, Form] = {"png": PngFolder(), "webdataset": Webdataset(), "npz": Npz()}


def join_npz(parts: Sequence[Path], target: Path) -> None:
    """Write one npz of the pictures and labels of several, in order. Memory holds one part at a time."""
    with open(target, "xb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name in ("arr_0.npy", "arr_1.npy"):
                arrays = [array for array in (_read_header(part, name) for part in parts) if array is not None]
                if arrays:
                    shapes, kinds = zip(*arrays, strict=True)
                    with _member(archive, name) as member:
                        _write_header(member, (sum(shape[0] for shape in shapes), *shapes[0][1:]), kinds[0])
                        for part in parts:
                            member.write(_read_array(part, name).tobytes())
        _sync(file)


def _encoded(key: str, finished: Finished, **data: Any) -> Encoded:
    image = finished.image
    pixels = hashlib.sha256(f"{image.mode} {image.width} {image.height} ".encode() + image.tobytes())
    return Encoded(key, finished.cell.label, finished.record, pixels.hexdigest(), **data)


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(zipfile.ZipInfo(name, _DATE), "w", force_zip64=True)


def _write_header(file: IO[bytes], shape: tuple[int, ...], kind: str) -> None:
    from numpy.lib import format

    format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})


def _read_header(path: Path, name: str) -> tuple[tuple[int, ...], str] | None:
    """Return the shape and dtype of an array in an npz, or None if the npz lacks it."""
    from numpy.lib import format

    with zipfile.ZipFile(path) as archive:
        if name not in archive.namelist():
            return None
        with archive.open(name) as file:
            format.read_magic(file)
            shape, _, kind = format.read_array_header_1_0(file)
            return shape, kind.str


def _read_array(path: Path, name: str) -> "np.ndarray":
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        return arrays[name.removesuffix(".npy")]


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())

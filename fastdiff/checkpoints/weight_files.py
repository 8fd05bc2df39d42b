"""Find the weight files of a component folder, and check that a config fits them before anything is loaded.

Imports no torch. The header of a safetensors file has the names and shapes of its tensors. Of a .bin file only the size
is known without running its code.
"""

import math
import os
import re
import stat
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from fastdiff.arguments import naming
from fastdiff.checkpoints.configs.model import Library, ModelConfig, Place
from fastdiff.checkpoints.json_files import MAX_BYTES, parse_json, read_json
from fastdiff.checkpoints.names import STEMS, Variant, extensions_of, index_names, is_file_name, weights_name
from fastdiff.errors import InputError
from fastdiff.schema import Wanted, checked

WeightMap = Annotated[dict[str, str], Wanted("an object of keys and their files; save the model again")]
Value = TypeVar("Value")
Shapes = dict[str, tuple[int, ...]]  # by diffusers' keys

EXTENSIONS = extensions_of(None)

_REMEDY = "use the weights that were saved with this config, or download them again"


class WeightFile(NamedTuple):
    """A file with tensors. A shard also has the path of its index, and the keys that the index lists for it."""

    path: Path
    index_path: Path | None = None
    keys: frozenset[str] | None = None


class InFile(NamedTuple):
    """The place of a part's weights in a single file, which may hold several parts."""

    path: Path
    layout: str  # the names of the tensors: a key of single_files.keys.LAYOUTS
    prefix: str  # of the part's keys in the file
    ema: bool = False  # whether to take the moving averages of the weights instead


def find(
    folder: str | Path,
    variant: str | None = None,
    library: Library = "diffusers",
    extensions: Sequence[str] = EXTENSIONS,
) -> list[WeightFile]:
    """Return the files with a component's weights: one file, or the shards of an index.

    The `library` determines the file names. The first of the `extensions` is preferred. As in diffusers, an index of
    shards is preferred over a single file, and a `variant` ("fp16") is part of the file's name. Raises InputError for
    missing weights, a bad index, anything but a regular file, and a compressed .bin.
    """
    checked("variant", variant, Variant | None)
    folder = Path(folder)
    for extension in extensions:
        for index in index_names(extension, variant, library):
            if _is_there(folder / index):
                return _shards(folder / index)
        single = folder / weights_name(extension, variant, library)
        if _is_there(single):
            check_archive(single)
            return [WeightFile(single)]
    raise InputError(_no_weights(folder, variant, library, extensions))


def check_fit(
    config: ModelConfig,
    folder: str | Path,
    variant: str | None,
    source: str | Path,
    extensions: Sequence[str] = EXTENSIONS,
) -> None:
    """Raise InputError if an option of `config` does not fit the weights in `folder`.

    This only reads headers and file sizes, so a model that the weights could not fill is never built. `source` names
    the config in errors.
    """
    files = find(folder, variant, config.LIBRARY, extensions)
    is_pickled = any(file.path.suffix != ".safetensors" for file in files)
    shapes = {} if is_pickled else own_keys(read_shapes(files), config)
    # Only the size of a .bin is known, and a parameter takes at least one byte.
    most = sum(os.path.getsize(file.path) for file in files) if is_pickled else None
    check_shapes(config, shapes, source, most)


def check_shapes(
    config: ModelConfig, shapes: Shapes, source: str | Path, most: int | None = None, remedy: str = _REMEDY
) -> None:
    """Raise InputError if an option of `config` does not fit weights of these shapes, by diffusers' keys.

    most: an upper bound of the number of parameters. Default: the parameters of `shapes`.
    remedy: the end of the error.
    """
    for option, place in config.places.items():
        there = size_at(place, shapes)
        if there is not None and there != place.size:
            raise InputError(f"{source}: {option} is {place.size}, but {there} in the weights ({place.key}); {remedy}")
    most = sum(map(math.prod, shapes.values())) if most is None else most
    for option, count in config.least_parameters.items():
        if count > most:
            raise InputError(f"{source}: {option} makes {count} parameters, but the weights hold {most}; {remedy}")


def own_keys(by_key: dict[str, Value], config: ModelConfig) -> dict[str, Value]:
    """Return the values by the model's own keys, for files with a prefix or with weights that the model does not have.

    The keys keep their prefix if two keys would become equal.
    """
    shortened = {key.removeprefix(config.KEY_PREFIX): value for key, value in by_key.items()}
    kept = shortened if len(shortened) == len(by_key) else by_key
    return {key: value for key, value in kept.items() if key not in config.UNUSED_KEYS}


def read_shapes(files: list[WeightFile]) -> Shapes:
    """Return the shapes of the tensors in safetensors files, from their headers. InputError for a damaged file."""
    return {key: tensor.shape for path, _, _ in files for key, tensor in read_header(path).tensors.items()}


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, as the header describes it."""

    shape: tuple[int, ...]
    dtype: object  # the format's name, such as "F16"; not checked
    offsets: object  # its first byte and the byte after its last, from the end of the header; not checked


class Header(NamedTuple):
    """The header of a safetensors file."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    size: int  # of the header, with its length: the data begins here


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file. Raises InputError for a damaged file; the data is not read."""
    try:
        return _header(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or not a safetensors file ({error}); download or save it again") from None


def _header(path: Path) -> Header:
    """Read the header: its length (8 bytes, little endian), then JSON, {key: {"shape": ...}} and a key of metadata."""
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError("it is truncated")
        (length,) = struct.unpack("<Q", start)
        if length > MAX_BYTES:
            raise ValueError(f"its header is {length} bytes long")
        entries = parse_json(file.read(length).decode("utf-8"))
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    said = entries.pop("__metadata__", None)
    metadata = {key: value for key, value in said.items() if isinstance(value, str)} if isinstance(said, dict) else {}
    return Header({key: _stored(entry) for key, entry in entries.items()}, metadata, 8 + length)


def _stored(entry: object) -> StoredTensor:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError("its header holds a tensor without a shape")
    return StoredTensor(tuple(shape), entry.get("dtype"), entry.get("data_offsets"))


def size_at(place: Place, shapes: Shapes) -> int | None:
    """Return the size at `place` in the weights, or None without such a tensor: missing keys are reported later."""
    if place.dimension is None:
        inside = {key.removeprefix(place.key).split(".")[0] for key in shapes if key.startswith(place.key)}
        return len(inside) or None
    shape = shapes.get(place.key, ())
    return shape[place.dimension] if place.dimension < len(shape) else None


def _is_there(path: Path) -> bool:
    """Return whether the file, or a link to it, exists. InputError for anything else, such as a pipe or a folder."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is not a regular file; download or save the model again")
    return True


def check_archive(path: Path) -> None:
    """Raise InputError for a .bin that unpacks to more than its size. torch.save writes uncompressed zip archives."""
    if path.suffix == ".safetensors" or not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError):
        return  # torch reports what is wrong with it
    if unpacked > os.path.getsize(path):
        raise InputError(f"{path} unpacks to {unpacked} bytes, more than its size; save the model as safetensors")


def _shards(index: Path) -> list[WeightFile]:
    with naming(str(index)):
        places = checked("weight_map", read_json(index).get("weight_map"), WeightMap)
    shards: dict[str, set[str]] = {}
    for key, shard in places.items():
        shards.setdefault(shard, set()).add(key)
    for shard in sorted(shards):
        if not is_file_name(shard):
            raise InputError(f"{index} names the shard {shard!r}; it must be a plain file name, in the same folder")
        if not _is_there(index.parent / shard):
            raise InputError(f"{index} names {shard}, which does not exist; download or save the model again")
        check_archive(index.parent / shard)
    return [WeightFile(index.parent / shard, index, frozenset(shards[shard])) for shard in sorted(shards)]


def _no_weights(folder: Path, variant: str | None, library: Library, extensions: Sequence[str]) -> str:
    stems = "|".join(STEMS[library].values())
    pattern = re.compile(rf"(?:{stems})(?:-\d+-of-\d+)?\.([\w-]+?)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    variants = sorted({match[1] for match in map(pattern.fullmatch, names) if match})
    wanted = weights_name(extensions[0], variant, library)
    if len(extensions) == 1 and not variant:
        return f"{folder} has no {wanted}; leave use_safetensors out, or save the model there with save_pretrained"
    if variants:
        return f"{folder} has no {wanted}; ask for one of its variants: {', '.join(variants)}"
    remedy = (
        "save the model there with save_pretrained" if variant is None else "it has no variants: leave the variant out"
    )
    return f"{folder} has no {wanted}; {remedy}"

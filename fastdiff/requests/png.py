"""The settings in a PNG: written as two iTXt chunks, and read by a bounded reader that does not trust the file.

The chunk `parameters` has the text format of AUTOMATIC1111, which other tools read. The chunk `fastdiff` is canonical
JSON and holds everything. Only the encoding of a picture imports numpy, so reading and errors are immediate.
"""

import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

from fastdiff.arguments import shown
from fastdiff.checkpoints.json_files import parse_json
from fastdiff.errors import InputError
from fastdiff.requests.file_option import FileOption, lora_names
from fastdiff.requests.record import check_types
from fastdiff.requests.syntax import Tag, tags_in
from fastdiff.sampler_names import A1111_NAMES

T = TypeVar("T")
SCHEMA = 1
NUMERICS = 3  # goes up when the bits of pictures change; a PNG without it has 1
MAX_TEXT = 2**20  # bytes of one text chunk, before and after decompression
MAX_CHUNKS = 2**20
MAX_INPUT = 2**26  # bytes of a picture inside a PNG
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
_UPSCALERS = {"pixels": "Lanczos", "latent": "Latent"}  # A1111's names
_OF_CONTROLNETS = (  # A1111's name, ours, and the default
    ("Weight", "control_scale", 1.0),
    ("Guidance Start", "control_start", 0.0),
    ("Guidance End", "control_end", 1.0),
)
_INPUT_CHUNK = b"fdIn"  # ours: optional, private, and safe to copy. PNG specification, 5.4


@dataclass(frozen=True)
class Recorded:
    """The settings in the PNG `path`, which a run repeats."""

    path: str
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, path: str) -> "Recorded":
        """Read a PNG. Raises as `read_settings`."""
        return cls(path, read_settings(path))


def encode(image, record: dict[str, Any] | None = None, inputs: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    """Return the PIL picture as PNG bytes, with `record` (JSON values) in both chunks before the pixels.

    inputs: files of pictures that the PNG holds too, by setting. `read_input` finds them.
    """
    from fastdiff.requests.png_pixels import chunk, encode_pixels

    texts = {}
    if record is not None:
        texts["parameters"] = parameters_text(record)
        texts["fastdiff"] = canonical_json({"schema": SCHEMA, "numerics": NUMERICS, **record})
    header, data = encode_pixels(image)
    stored = [chunk(b"iTXt", f"{name}\0\0\0\0\0{text}".encode()) for name, text in texts.items()]
    stored += [chunk(_INPUT_CHUNK, name.encode() + b"\0" + file) for name, file in inputs.items()]
    return b"".join([_SIGNATURE, header, *stored, *data, chunk(b"IEND", b"")])


def check_input(name: str, size: int) -> None:
    """Raise InputError for a picture of `size` bytes that is too large for a place inside a PNG."""
    if size > MAX_INPUT:
        raise InputError(f"--embed-inputs: {name} has more than {MAX_INPUT >> 20} MiB; leave it out")


def read_input(path: str | Path, setting: str) -> bytes | None:
    """Return the file of a setting's picture inside the PNG `path`, or None if there is none. Raises as `read_text`."""
    start = setting.encode() + b"\0"

    def find(file: BinaryIO) -> bytes | None:
        found = (data for _, data in _chunks(file, (_INPUT_CHUNK,), MAX_INPUT + len(start)) if data.startswith(start))
        return next((data[len(start) :] for data in found), None)

    return _read(path, find)


def without_inputs(path: str | Path) -> bytes:
    """Return the PNG `path` without the pictures inside it. Raises as `read_text`."""

    def cut(file: BinaryIO) -> bytes:
        data, parts, end = file.read(), [], 0
        file.seek(0)
        for _, each in _chunks(file, (_INPUT_CHUNK,), len(data)):
            parts.append(data[end : file.tell() - len(each) - 12])  # length, type and checksum
            end = file.tell()
        return b"".join([*parts, data[end:]])

    return _read(path, cut)


def canonical_json(record: dict[str, Any]) -> str:
    """Return ASCII JSON with sorted keys and no spaces: equal records give equal texts, and lone surrogates survive."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parameters_text(record: dict[str, Any]) -> str:
    """Return `record` in A1111's syntax: the prompt or the class, then one line of settings that starts with Steps.

    Civitai takes the first line that starts with "Steps: ", and every parser splits at "Negative prompt:". A prompt
    that contains either is changed in this text only. Values must have no commas, colons or line breaks.
    """
    lines = [_prompt(record)]
    if record.get("negative_prompt"):
        lines.append(f"Negative prompt: {_harmless(record['negative_prompt'])}")
    lines.append(", ".join(f"{key}: {value}" for key, value in _settings(record).items()))
    return "\n".join(filter(None, lines)).encode(errors="replace").decode()


def _prompt(record: dict[str, Any]) -> str:
    """Return the prompt or the label, or all of them for a grid."""
    if record.get("prompt") is not None:
        prompts = record["prompt"] if isinstance(record["prompt"], list) else [record["prompt"]]
        named = {tag.name for prompt in prompts for tag in _tags(prompt, record.get("prompt_syntax"))}
        return _harmless("\n".join(prompts) + _lora_tags(record.get("lora") or (), named))
    labels = record.get("label")
    labels = labels if isinstance(labels, list) else [labels]
    names = (f"class {label}" if isinstance(label, int) else label for label in labels if label is not None)
    return _harmless(" ".join(", ".join(names).split()))


def _harmless(text: str) -> str:
    return re.sub(r"(Steps|Negative prompt):", r"\1 :", text.replace("\0", " "))


def _settings(record: dict[str, Any]) -> dict[str, Any]:
    """Return the settings by A1111's names, in its order, without those that are missing or None.

    A1111 counts Clip skip from 1: 1 uses all layers. Its size of an enlarged picture is the size before.
    """
    scheduler, seed, version = record.get("scheduler"), record.get("seed"), record.get("versions", {}).get("fastdiff")
    sampler, schedule_type = (None, None) if scheduler is None else sampler_name(scheduler)
    base = "base_" if record.get("upscale") else ""
    sides = record.get(f"{base}width"), record.get(f"{base}height")
    settings = {
        "Steps": record.get("num_inference_steps"),
        "Sampler": sampler,
        "Schedule type": schedule_type,
        "CFG scale": record.get("guidance_scale"),
        "Seed": seed[0] if isinstance(seed, list) else seed,
        "Size": None if None in sides else "{}x{}".format(*sides),
        "Model hash": record["model_hash"][:10] if record.get("model_hash") else None,
        "Model": _model(record["model"]) if "model" in record else None,
        "VAE hash": record["vae_hash"][:10] if record.get("vae_hash") else None,
        "VAE": _last_part(record["vae"]) if record.get("vae") else None,
        "Denoising strength": record.get("strength") or record.get("upscale_strength"),
        **_of_masks(record),
        "Hires upscale": record.get("upscale"),
        "Hires upscaler": record.get("upscale") and _UPSCALERS.get(record.get("upscale_mode") or ""),
        "Clip skip": record["clip_skip"] + 1 if record.get("clip_skip") else None,
        "Lora hashes": _loras(record.get("lora") or (), record.get("lora_hashes") or ()),
        "TI hashes": _embeddings(record.get("embedding") or (), record.get("embedding_hashes") or ()),
        **_controlnets(record),
        "Precision": record.get("precision"),
        "Version": version and f"fastdiff {version}",
        "Eta": record.get("eta") or None,
        "Guidance start": record.get("guidance_start"),
        "Guidance stop": record.get("guidance_stop"),
        "Prompt syntax": record.get("prompt_syntax"),
        "Emphasis": record.get("emphasis") and "No norm",
        **_axes(record.get("axes", {})),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _of_masks(record: dict[str, Any]) -> dict[str, Any]:
    crop = record.get("mask_crop")
    area = {} if crop is None else {"Inpaint area": "Only masked", "Masked area padding": crop}
    return {"Mask blur": record.get("mask_blur"), **area}


def _controlnets(record: dict[str, Any]) -> dict[str, str]:
    """Return an entry for each ControlNet, and for each IP-Adapter, as A1111's extension writes them."""
    names, digits = record.get("control") or (), record.get("control_hashes") or ()
    mode = "ControlNet is more important" if record.get("guess_mode") else "Balanced"
    found = {}
    for i, name in enumerate(names):
        settings = {"Module": "none", "Model": f"{_model(name)} [{digits[i][:8]}]" if i < len(digits) else _model(name)}
        for shown_as, setting, default in _OF_CONTROLNETS:
            values = record.get(setting) or ()
            settings[shown_as] = f"{values[i] if i < len(values) else default:g}"
        settings["Control Mode"] = mode
        found[f"ControlNet {i}"] = _quoted(settings)
    names, digits = record.get("ip_adapter") or (), record.get("ip_adapter_hashes") or ()
    scales = record.get("ip_adapter_scale") or ()
    for i, name in enumerate(names):
        model = f"{_model(name)} [{digits[i][:8]}]" if i < len(digits) else _model(name)
        settings = {"Module": "ip-adapter-auto", "Model": model, "Weight": f"{scales[i] if i < len(scales) else 1.0:g}"}
        found[f"ControlNet {len(found)}"] = _quoted(settings)
    return found


def _quoted(settings: Mapping[str, str]) -> str:
    return json.dumps(", ".join(f"{key}: {value}" for key, value in settings.items()))


def _embeddings(names: Sequence[str], digits: Sequence[str]) -> str | None:
    """Return the tokens and hashes of embeddings in quotes, "cat: 0123456789ab, dog: ...", as A1111 writes them."""
    tokens = [re.sub(r"[,:\s]+", " ", FileOption.parse(name).value or "") for name in names]
    listed = ", ".join(f"{token}: {each[:12]}" for token, each in zip(tokens, digits, strict=False))
    return json.dumps(_harmless(listed)) if listed else None


def _loras(names: Sequence[str], digits: Sequence[str]) -> str | None:
    """Return the names and hashes of LoRAs in quotes, as A1111 writes them: "style: 0123456789ab"."""
    files = [_model(FileOption.parse(name).path) for name in names]
    listed = ", ".join(f"{file}: {each[:12]}" for file, each in zip(files, digits, strict=False))
    return json.dumps(_harmless(listed)) if listed else None


def _tags(prompt: str, prompt_syntax: str | None) -> tuple[Tag, ...]:
    """Return the LoRA tags of a recorded prompt, or none if they are damaged."""
    try:
        return tags_in(prompt, prompt_syntax)
    except InputError:
        return ()


def _lora_tags(texts: Sequence[str], named: Collection[str]) -> str:
    """Return the LoRAs that the prompt has not `named`, as A1111 writes them into it: " <lora:style:0.8>"."""
    options = [FileOption.parse(text) for text in texts]
    others = [option for option, name in zip(options, lora_names(options), strict=True) if name not in named]
    return "".join(f" <lora:{_model(option.path)}:{option.value or 1}>" for option in others)


def _model(name: str) -> str:
    """Return the last part of a model's path. As in A1111, a file has no suffix."""
    return re.sub(r"\.(?:safetensors|sft)$", "", _last_part(name), flags=re.IGNORECASE)


def _last_part(name: str) -> str:
    """Return the last part of a path, without commas and colons."""
    return re.sub(r"[,:\s]+", " ", re.split(r"[\\/]", name.rstrip("\\/"))[-1])


def _axes(axes: dict[str, Any]) -> dict[str, str]:
    """Return the axes of an X/Y sheet by the names of A1111's X/Y/Z plot. Values are quoted, as they hold commas."""
    settings = {}
    for place, axis in axes.items():
        settings[f"{place.upper()} Type"] = axis["name"].replace("_", " ").capitalize()
        settings[f"{place.upper()} Values"] = json.dumps(_harmless(", ".join(map(str, axis["values"]))))
    return settings


def sampler_name(scheduler: str) -> tuple[str, str | None]:
    """Return A1111's sampler and schedule type for a scheduler's name."""
    name = scheduler.removesuffix("-karras")
    return A1111_NAMES.get(name, name.upper()), None if name == scheduler else "Karras"


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the record in the `fastdiff` chunk of the PNG `path`, with its schema. Only the types are checked.

    InputError if the file does not exist, is not a valid PNG, or holds no fastdiff settings.
    """
    text = read_text(path)
    if "fastdiff" not in text:
        raise InputError(f"{path} holds no fastdiff settings; give a PNG that fastdiff wrote")
    return parse_record(text["fastdiff"], path)


def parse_record(text: str, path: str | Path) -> dict[str, Any]:
    """Return the JSON object of a `fastdiff` chunk, with settings of the right types or without them.

    InputError, which names `path`, if it is damaged or newer.
    """
    try:
        record = parse_json(text, _no_constant)
    except ValueError:
        raise InputError(f"{path} holds damaged fastdiff settings; give another PNG") from None
    schema = record.get("schema") if isinstance(record, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise InputError(f"{path} holds fastdiff settings in an unknown format; a newer fastdiff may read them")
    check_types(record, path)
    return record


def without_half_pairs(record: T) -> T:
    """Return JSON values with "?" for each half of a surrogate pair, which no browser reads."""
    return json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))


def numerics_notice(record: Mapping[str, Any], source: str | Path) -> str | None:
    """Return a line if this version rounds differently from the version that drew the picture of `record`."""
    theirs = record.get("numerics", 1)
    if theirs == NUMERICS:
        return None
    drawn = f"{source} was drawn with numerics {shown(theirs)}, and this fastdiff has numerics {NUMERICS}"
    return f"{drawn}; the picture may differ in its last bits"


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def read_text(path: str | Path) -> dict[str, str]:
    """Return the texts of the first `parameters` chunk and the first `fastdiff` chunk of the PNG `path`, by keyword.

    Memory is bounded for any file: pixels are skipped, and a text over MAX_TEXT is an InputError.
    """
    return _read(path, lambda file: _texts(file, path))


def _read(path: str | Path, read: Callable[[BinaryIO], T]) -> T:
    """Call `read` on the open PNG `path`. Raises InputError, which names it, if it cannot be read."""
    try:
        # Opening a pipe would wait for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{path} is not a file; give a PNG")
        with open(path, "rb") as file:
            return read(file)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give a PNG") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, or raised by _texts
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as a PNG ({error}); give a PNG that fastdiff wrote") from None


def _texts(file: BinaryIO, path: str | Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for kind, data in _chunks(file, _TEXT_CHUNKS, MAX_TEXT):
        keyword, _, rest = data.partition(b"\0")
        name = keyword.decode("latin-1")
        if name in ("parameters", "fastdiff") and name not in texts:
            texts[name] = _decode(kind, rest)
    return texts


def _chunks(file: BinaryIO, kinds: Sequence[bytes], most: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield (type, data) of each chunk of these types up to IEND; skip the others. ValueError if the format is broken.

    most: the largest number of bytes that a chunk of these types may have.
    """
    size = os.fstat(file.fileno()).st_size
    if file.read(len(_SIGNATURE)) != _SIGNATURE:
        raise ValueError("it has no PNG signature")
    for index in range(MAX_CHUNKS):
        header = file.read(8)
        if len(header) < 8:
            raise ValueError("it is truncated")
        length, kind = struct.unpack(">I4s", header)
        if (index == 0) != (kind == b"IHDR"):
            raise ValueError("its header chunk is missing or misplaced")
        if file.tell() + length + 4 > size:
            raise ValueError("it is truncated")
        if kind == b"IEND":
            return
        if kind not in kinds:
            file.seek(length + 4, os.SEEK_CUR)
            continue
        if length > most:
            raise ValueError(f"a text chunk of {length} bytes is over the limit of {most}")
        data = file.read(length)
        if file.read(4) != struct.pack(">I", zlib.crc32(data, zlib.crc32(kind))):
            raise ValueError("a text chunk has a wrong checksum")
        yield kind, data
    raise ValueError(f"it has more than {MAX_CHUNKS} chunks")


def _decode(kind: bytes, data: bytes) -> str:
    """Return the text after a chunk's keyword. ValueError if it is malformed. PNG specification, 11.3.3."""
    if kind == b"tEXt":
        return data.decode("latin-1")
    if kind == b"zTXt":
        return _inflate(data[1:]).decode("latin-1")
    compressed = data[:1] == b"\1"
    fields = data[2:].split(b"\0", 2)  # language, translated keyword, text
    if len(fields) < 3:
        raise ValueError("a text chunk is malformed")
    return (_inflate(fields[2]) if compressed else fields[2]).decode("utf-8")


def _inflate(data: bytes) -> bytes:
    try:
        text = zlib.decompressobj().decompress(data, MAX_TEXT + 1)
    except zlib.error:
        raise ValueError("a compressed text chunk is damaged") from None
    if len(text) > MAX_TEXT:
        raise ValueError(f"a compressed text chunk holds more than {MAX_TEXT} bytes")
    return text

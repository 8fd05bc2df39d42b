"""SingleFile: what a file of weights holds, from its header alone. Imports no torch.

Every file comes from outside: names, shapes and sizes are checked before anything depends on them.
"""

import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fastdiff.arguments import shown
from fastdiff.checkpoints.registry import CONTROLNET, TEXT_ENCODER, TEXT_ENCODER_2, UNET_CONDITION, VAE
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.kinds import ANY_REFUSED, BASES, MARKS, REFUSED, Mark
from fastdiff.checkpoints.weight_files import Header, InFile, StoredTensor, read_header
from fastdiff.errors import InputError
from fastdiff.kinds import PredictionType

SUFFIXES = (".safetensors", ".sft")
SIZES = {  # bytes of an element, by the format's names
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}
SHOWN = 3  # keys in an error

_PICKLED = (
    "download the model as safetensors, or convert the file where you trust it: load it with "
    "torch.load(..., weights_only=True), and write its state_dict with safetensors.torch.save_file"
)
_EMA = "model_ema."
_PART_NAMES = {UNET_CONDITION.name: "U-Net", VAE.name: "VAE", TEXT_ENCODER.name: "text encoder"}
_ENCODER_NAMES = (TEXT_ENCODER.name, TEXT_ENCODER_2.name)
_PART_NAMES |= {TEXT_ENCODER_2.name: "second text encoder", CONTROLNET.name: "ControlNet"}


@dataclass(frozen=True)
class SingleFile:
    """A file of weights: what it is, and where its parts are."""

    path: Path
    kind: str  # such as "checkpoint of Stable Diffusion XL" or "a LoRA"
    base: str | None  # one of kinds.BASES; None: unknown, or a part that several have
    parts: Mapping[str, InFile]  # by their names in a pipeline
    header: Header
    refusal: str | None = None  # why fastdiff cannot load it
    inpaints: bool = False  # whether its U-Net also reads a mask and a masked picture

    def check(self) -> None:
        """Raise InputError if fastdiff cannot load the file."""
        if self.refusal is not None:
            raise InputError(f"{self.path} {self.refusal}")

    @property
    def summary(self) -> str:
        """The kind in a line of a list, with what fastdiff cannot load marked."""
        return self.kind if self.refusal is None else f"unusable: {self.refusal}"

    @property
    def is_whole(self) -> bool:
        """Whether the file has a U-Net and all text encoders of its base. A VAE can come from another file."""
        encoders = {mark.part for mark in MARKS if mark.base == self.base and self.base}
        return bool(encoders) and {UNET_CONDITION.name, *encoders} <= self.parts.keys()

    @property
    def part_names(self) -> list[str]:
        """The names of the parts in words, such as "U-Net"."""
        return [_PART_NAMES[name] for name in self.parts]

    @property
    def encoders_base(self) -> str | None:
        """The base model of a text encoder alone, by its width. SD 1 and SDXL have the same first one."""
        encoder = next((self.parts[name] for name in _ENCODER_NAMES if name in self.parts), None)
        return None if encoder is None else kinds.BY_ENCODER.get(_encoder_width(encoder, self.header.tensors) or 0)

    @property
    def has_ema(self) -> bool:
        """Whether the file also holds moving averages of the U-Net's weights."""
        return any(key.startswith(_EMA) for key in self.header.tensors)

    def precision(self, part: str) -> str:
        """Return the dtypes of a part's tensors by the format's names, the most frequent first."""
        prefix = self.parts[part].prefix
        counts: dict[str, int] = {}
        for key, tensor in self.header.tensors.items():
            if key.startswith(prefix) and tensor.shape:
                counts[str(tensor.dtype)] = counts.get(str(tensor.dtype), 0) + math.prod(tensor.shape)
        return ", ".join(sorted(counts, key=lambda name: -counts[name]))

    def part(self, name: str, *, ema: bool = False) -> InFile:
        """Return where a part is. Raises InputError if the file does not have it.

        ema: whether to take the moving averages of its weights.
        """
        self.check()
        alone = next((each for each in _ENCODER_NAMES if each in self.parts), None)
        if name in _ENCODER_NAMES and alone is not None and len(self.parts) == 1:
            name = alone  # its width does not always tell which encoder it is
        if name not in self.parts:
            has = " and ".join(self.part_names)
            raise InputError(f"{self.path} holds no {_PART_NAMES.get(name, name)}, only {has}; give a file that does")
        if ema and not self.has_ema:
            raise InputError(f"{self.path} holds no moving averages (EMA) of its weights; leave extract_ema out")
        return self.parts[name]._replace(ema=ema)

    def stated_prediction(self) -> PredictionType | None:
        """Return the prediction type that the file states: by the empty key `v_pred`, or in its metadata."""
        if "v_pred" in self.header.tensors:
            return "v_prediction"
        said = self.header.metadata.get("modelspec.prediction_type", "").strip().lower().replace("-", "_")
        names: dict[str, PredictionType] = {"v": "v_prediction", "v_prediction": "v_prediction"}
        return (names | {"epsilon": "epsilon", "eps": "epsilon"}).get(said)

    @property
    def has_zero_snr(self) -> bool:
        """Whether the file states, by the empty key `ztsnr`, that its last step has no signal."""
        return "ztsnr" in self.header.tensors

    def global_step(self) -> int | None:
        """Return the number of training steps if the file holds it, which tells SD 2-base from SD 2."""
        stored = self.header.tensors.get("global_step")
        if stored is None or math.prod(stored.shape) != 1 or stored.dtype not in ("I64", "I32"):
            return None
        first, last = _offsets(stored)
        with open(self.path, "rb") as file:
            file.seek(self.header.size + first)
            return int.from_bytes(file.read(last - first), "little", signed=True)


def has_model_suffix(name: str | Path) -> bool:
    """Return whether a name is that of a file of weights, also of a kind that fastdiff refuses."""
    return os.path.splitext(name)[1].lower() in (*SUFFIXES, *kinds.PICKLES, ".gguf")


def is_single_file(name: str | Path) -> bool:
    """Return whether `name` is a file, or has the suffix of one without being a folder."""
    return os.path.isfile(name) or (has_model_suffix(name) and not os.path.isdir(name))


def read_single_file(path: str | Path) -> SingleFile:
    """Read the header of a file and recognise it. Raises InputError if it is no safetensors file, or is unknown."""
    path = Path(path)
    return recognised(path, checked_header(path))


def recognised(path: Path, header: Header) -> SingleFile:
    """Return what a file with this header is. Raises InputError if it is unknown."""
    refused = _refused_kind(header.tensors)
    found = _marks(header.tensors)
    parts = {mark.part: InFile(path, mark.layout, mark.prefix) for mark in found.values()}
    if refused is not None and not (UNET_CONDITION.name in parts and refused.alone):
        reason = f"is {refused.name}: {refused.reason}; {kinds.HOLDS}"
        return SingleFile(path, refused.name, None, {}, header, reason)
    problem = _two_models(found, header.tensors, refused)
    if not parts:
        keys = ", ".join(map(shown, list(header.tensors)[:SHOWN])) or "none"
        raise InputError(f"{path} holds no model that fastdiff knows; its tensors are {keys}...; {kinds.HOLDS}")
    base = _base(found, header.tensors)
    if problem is not None:
        return SingleFile(path, "several models", None, parts, header, f"holds {problem}; {kinds.HOLDS}")
    other = _other_task(found, header.tensors)
    if other is not None:
        return SingleFile(path, other, base, parts, header, f"is {other}: {kinds.OTHER}; {kinds.HOLDS}")
    inpaints = _channels(found, header.tensors) == kinds.INPAINTING
    return _named(SingleFile(path, "", base, _named_by_width(parts, header.tensors), header, inpaints=inpaints))


def checked_header(path: Path, pickled: str = _PICKLED) -> Header:
    """Return the header of a safetensors file. Its tensors are inside the file.

    Raises InputError for a file that does not exist, for another format, and for a damaged file. `pickled` says what to
    do with a pickle.
    """
    _check_format(path, pickled)
    header = read_header(path)
    _check_extents(path, header)
    return header


def _check_format(path: Path, pickled: str) -> None:
    """Raise InputError for a file that does not exist, and for a format other than safetensors."""
    if is_pickle(path):
        raise InputError(f"{path} is a pickle, and loading a pickle can run code that is hidden in it; {pickled}")


def is_pickle(path: Path) -> bool:
    """Return whether a file of weights is a pickle, else it is a safetensors file.

    Raises InputError for a file that does not exist, and for another format.
    """
    start = b""
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
        if is_regular:  # to open a pipe may never end
            with open(path, "rb") as file:
                start = file.read(32)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give a safetensors file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); give a safetensors file") from None
    if not is_regular:
        raise InputError(f"{path} is not a regular file; give a safetensors file")
    if start[8:9] == b"{":  # a safetensors header, whose length before it may be any 8 bytes
        return False
    what = next((what for first, what in kinds.STARTS.items() if start.startswith(first)), None)
    if what == "a pickle" or (what is None and path.suffix.lower() in kinds.PICKLES):
        return True
    if what is not None:
        raise InputError(f"{path} is {what}; download the model as a safetensors file")
    return False


def _check_extents(path: Path, header: Header) -> None:
    """Raise InputError for a tensor that is not inside the file, or whose size does not fit its shape."""
    room = os.path.getsize(path) - header.size
    for key, tensor in header.tensors.items():
        first, last = _offsets(tensor)
        wanted = math.prod(tensor.shape) * SIZES.get(str(tensor.dtype), 0)
        if min(tensor.shape, default=0) < 0 or not 0 <= first <= last or wanted not in (0, last - first):
            raise InputError(f"{path} is damaged: the size of {shown(key)} does not fit its shape; download it again")
        if last > room:
            raise InputError(f"{path} is truncated: {shown(key)} ends beyond the end of the file; download it again")


def _offsets(tensor: StoredTensor) -> tuple[int, int]:
    """Return the first byte and the end of a tensor's data. (-1, -1) for a malformed entry."""
    given = tensor.offsets
    if isinstance(given, list) and len(given) == 2 and all(type(each) is int for each in given):
        return given[0], given[1]
    return -1, -1


def _refused_kind(keys: Iterable[str]) -> kinds.Refused | None:
    suspects = [key for key in keys if ANY_REFUSED.search(key)]
    return next((each for each in REFUSED if any(re.search(each.pattern, key) for key in suspects)), None)


def _marks(keys: Iterable[str]) -> dict[str, Mark]:
    """Return the marks whose keys are there, by key."""
    keys = set(keys)
    return {f"{mark.prefix}{mark.key}": mark for mark in MARKS if f"{mark.prefix}{mark.key}" in keys}


def _two_models(
    found: Mapping[str, Mark], tensors: Mapping[str, StoredTensor], refused: kinds.Refused | None
) -> str | None:
    """Return in words that the file holds the parts of two models, or None."""
    if refused is not None:
        return f"two models: also {refused.name}"
    by_part: dict[str, list[str]] = {}
    for key, mark in found.items():
        by_part.setdefault(mark.part, []).append(key)
    twice = next((keys for keys in by_part.values() if len(keys) > 1), None)
    if twice is not None:
        return f"two models: it has both {twice[0]} and {twice[1]}"
    bases = {mark.base for mark in found.values() if mark.base} | ({_unets_base(found, tensors)} - {None})
    if len(bases) > 1:
        return f"parts of two models: {' and '.join(sorted(filter(None, bases)))}"
    return None


def _base(found: Mapping[str, Mark], tensors: Mapping[str, StoredTensor]) -> str | None:
    said = {mark.base for mark in found.values() if mark.base}
    return next(iter(said), None) or _unets_base(found, tensors)


def _unet(found: Mapping[str, Mark]) -> Mark | None:
    return next((mark for mark in found.values() if mark.part == UNET_CONDITION.name), None)


def _channels(found: Mapping[str, Mark], tensors: Mapping[str, StoredTensor]) -> int | None:
    """Return the input channels of the U-Net, 0 for a malformed one. None without a U-Net."""
    unet = _unet(found)
    return None if unet is None else next(iter(tensors[f"{unet.prefix}{unet.key}"].shape[1:2]), 0)


def text_width(prefix: str, tensors: Mapping[str, StoredTensor]) -> int | None:
    """Return the width of the text that a U-Net reads, or a ControlNet. None if it reads none."""
    return _width(prefix, ".attn2.to_k.weight", tensors)


def _width(prefix: str, end: str, tensors: Mapping[str, StoredTensor]) -> int | None:
    """Return the last size of the first tensor whose key begins and ends so. A malformed scalar has none."""
    shapes = (each.shape for key, each in tensors.items() if key.startswith(prefix) and key.endswith(end))
    return next((shape[-1] for shape in shapes if shape), None)


def _unets_base(found: Mapping[str, Mark], tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the base model that a U-Net of a known width belongs to."""
    unet = _unet(found)
    return None if unet is None else kinds.BY_CONTEXT.get(text_width(unet.prefix, tensors) or 0)


def _other_task(found: Mapping[str, Mark], tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the name of a model that does what fastdiff does not do, or of another family's part."""
    channels = _channels(found, tensors)
    if channels == kinds.INPAINTING and _unets_base(found, tensors) == kinds.REFINER:
        return "a refiner for inpainting"
    if channels not in (None, kinds.LATENTS, kinds.INPAINTING):
        return kinds.CHANNELS.get(channels, f"a U-Net of {channels} input channels")
    vae = next((mark for mark in found.values() if mark.part == VAE.name), None)
    if vae is not None:
        stored = tensors.get(f"{vae.prefix}decoder.conv_in.weight")
        latents = stored.shape[1] if stored is not None and len(stored.shape) == 4 else 0
        if latents != kinds.LATENTS:
            return f"a VAE of {latents} latent channels, as other model families have"
    return None


def _named_by_width(parts: Mapping[str, InFile], tensors: Mapping[str, StoredTensor]) -> dict[str, InFile]:
    """Return the parts in a pipeline's order. A text encoder alone is named by its width."""
    first = parts.get(TEXT_ENCODER.name)
    if first is not None and len(parts) == 1 and _encoder_width(first, tensors) == kinds.WIDTH_OF_ENCODER_2:
        return {TEXT_ENCODER_2.name: first}
    return {name: parts[name] for name in _PART_NAMES if name in parts}


def _encoder_width(encoder: InFile, tensors: Mapping[str, StoredTensor]) -> int | None:
    return _width(encoder.prefix, "token_embedding.weight", tensors)


def _named(found: SingleFile) -> SingleFile:
    """Return the file with its kind in words."""
    if found.is_whole:
        kind = f"checkpoint of {found.base}"
    elif set(found.parts) == {VAE.name}:
        kind = f"VAE of {', '.join(BASES[:-1])} or XL"
    elif set(found.parts) == {UNET_CONDITION.name}:
        kind = f"U-Net of {found.base}" if found.base else "U-Net of an unknown size"
    elif UNET_CONDITION.name not in found.parts and len(found.parts) == 1:
        (encoder,) = found.parts.values()
        width = _encoder_width(encoder, found.header.tensors) or 0
        kind = f"text encoder {kinds.ENCODERS.get(width, f'of width {width}')}"
    else:
        kind = f"{' and '.join(found.part_names)} of {found.base or 'an unknown model'}"
    return replace(found, kind=f"{kind} for inpainting" if found.inpaints else kind)

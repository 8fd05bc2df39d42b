"""Recognise the files of textual inversion: vectors that stand for a token of the prompt. Only headers are read.

| file | its tensors |
|---|---|
| diffusers | one, whose key is the token |
| A1111, kohya | `emb_params`; the file's name is the token |
| Stable Diffusion XL | `clip_l` and `clip_g`, for the two text encoders; the file's name is the token |

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastdiff.arguments import shown
from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.reading import checked_header, read_single_file
from fastdiff.errors import InputError

UNNAMED = "emb_params"  # the key of a tensor whose token is the file's name
OF_ENCODERS = ("clip_l", "clip_g")  # the keys of tensors for SDXL's first and second text encoder
FIRST_NAME = "learned_embeds.safetensors"  # as diffusers' training scripts save it
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")

REMEDY = "give the safetensors file of a textual inversion"
CONVERT = (
    "convert it where you trust it: load it with torch.load(..., weights_only=True), and write its vectors with "
    "safetensors.torch.save_file({'emb_params': vectors}, ...)"
)


@dataclass(frozen=True)
class Vectors:
    """A tensor of an embedding: its key, and its size."""

    key: str
    count: int
    width: int


@dataclass(frozen=True)
class Embedding:
    """An embedding: its vectors for each text encoder, and the token that it names itself."""

    source: str  # what to call it in errors
    token: str | None  # None: the caller must name it
    tensors: Mapping[int, Vectors]  # by the index of the text encoder

    @property
    def vectors(self) -> int:
        """The number of vectors, which is the number of tokens that it takes in a prompt."""
        return next(iter(self.tensors.values())).count

    @property
    def is_of_sdxl(self) -> bool:
        """Whether it says that it is for one of SDXL's text encoders."""
        return all(each.key in OF_ENCODERS for each in self.tensors.values())

    @property
    def summary(self) -> str:
        """The embedding in a line of a list."""
        count = f"{self.vectors} vector{'' if self.vectors == 1 else 's'}"
        return f"embedding for {self.base}, token {self.token}, {count}"

    @property
    def base(self) -> str:
        """The model that it was trained for, in words."""
        return kinds.SDXL if self.is_of_sdxl else base_of_width(next(iter(self.tensors.values())).width)


def base_of_width(width: int) -> str:
    """Return in words which text encoder reads vectors of this width."""
    base = kinds.BY_ENCODER.get(width)
    if base is None:
        return f"a text encoder of width {width}"
    return f"the second text encoder of {base}" if base == kinds.SDXL else base


def read_embedding(path: str | Path) -> Embedding:
    """Read the header of an embedding's file.

    Raises InputError for a file that does not exist or is damaged, for another kind of file, and for vectors of another
    shape or dtype.
    """
    path = Path(path)
    header = checked_header(path, CONVERT)
    if not header.tensors:
        raise InputError(f"{path} is empty: it holds no tensors; {REMEDY}")
    if not header.tensors.keys() <= {UNNAMED, *OF_ENCODERS}:
        _check_other_kinds(path)
    for key, tensor in header.tensors.items():
        if tensor.dtype not in FLOATS:
            raise InputError(f"{path}: {shown(key)} has the dtype {tensor.dtype}, not of real numbers; {REMEDY}")
    shapes = {key: tensor.shape for key, tensor in header.tensors.items()}
    return recognise(shapes, str(path), path.stem)


def if_embedding(path: str | Path) -> Embedding | None:
    """Return the embedding in a file, or None for any other file."""
    try:
        return read_embedding(path)
    except InputError:
        return None


def _check_other_kinds(path: Path) -> None:
    """Raise InputError for a file of a kind that fastdiff knows, such as a checkpoint or a LoRA."""
    try:
        kind = read_single_file(path).kind
    except InputError:  # it is none of them
        return
    if kind != kinds.EMBEDDING:
        raise InputError(f"{path} is {kind if kind.startswith('a ') else f'a {kind}'}, and no embedding; {REMEDY}")


def recognise(shapes: Mapping[str, tuple[int, ...]], source: str, stem: str | None) -> Embedding:
    """Return the embedding that tensors with these keys and shapes are.

    source: its name in errors. stem: the token if no key is one. Raises InputError if it is none.
    """
    keys = set(shapes)
    if keys <= set(OF_ENCODERS) and keys:
        tensors = {i: _vectors(key, shapes[key], source) for i, key in enumerate(OF_ENCODERS) if key in keys}
        if len({each.count for each in tensors.values()}) > 1:
            counts = " and ".join(str(each.count) for each in tensors.values())
            raise InputError(f"{source}: clip_l and clip_g have {counts} vectors, and they must have as many; {REMEDY}")
        return Embedding(source, stem, tensors)
    if len(keys) == 1:
        (key,) = keys
        token = stem if key == UNNAMED else key
        return Embedding(source, token, {0: _vectors(key, shapes[key], source)})
    names = ", ".join(map(shown, list(shapes)[:3])) or "none"
    raise InputError(
        f"{source} is no embedding: its tensors are {names}...; an embedding has one, or clip_l and clip_g; {REMEDY}"
    )


def _vectors(key: str, shape: tuple[int, ...], source: str) -> Vectors:
    """Return the size of a tensor (C,) or (vectors, C)."""
    if len(shape) not in (1, 2):
        raise InputError(
            f"{source}: {shown(key)} has the shape {shape}; an embedding has (vectors, channels); {REMEDY}"
        )
    count, width = shape if len(shape) == 2 else (1, *shape)
    if count < 1 or width < 1:
        raise InputError(f"{source} is empty: {shown(key)} has the shape {shape}; {REMEDY}")
    return Vectors(key, count, width)


def find_embedding(folder: Path, weight_name: str | None, subfolder: str | None = None) -> Path:
    """Return the embedding's file in a folder: `weight_name`, else diffusers' own name, else the only safetensors file.

    Raises InputError if there is none, or more than one.
    """
    folder = folder / subfolder if subfolder else folder
    if weight_name is not None:
        return folder / weight_name
    files = sorted(each for each in _entries(folder) if each.suffix.lower() == ".safetensors")
    named = [each for each in files if each.name == FIRST_NAME]
    if len(files) != 1 and not named:
        count = f"{len(files)} safetensors files" if files else "no safetensors file"
        raise InputError(f"{folder} has {count}; name the embedding's file with weight_name=")
    return (named or files)[0]


def _entries(folder: Path) -> list[Path]:
    try:
        return [*folder.iterdir()]
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error}); {REMEDY}") from None

"""Names of files: checks of names from outside, none of which may lead out of its folder, and names of weight files.

Symbolic links in a folder may lead out of it: the hub's cache consists of them.
"""

import re
from typing import Annotated

from annotated_types import Predicate

from fastdiff.checkpoints.configs.model import Library
from fastdiff.schema import Wanted, checked

# The stem of each library's weight files, by extension
STEMS: dict[Library, dict[str, str]] = {
    "diffusers": {"safetensors": "diffusion_pytorch_model", "bin": "diffusion_pytorch_model"},
    "transformers": {"safetensors": "model", "bin": "pytorch_model"},
}

# The hub's client names a file after the revision. These are the names that git allows: see `git check-ref-format`.
_REVISION = re.compile(r"(?!.*(\.\.|//))[^\s/~^:?*\[\\\0][^\s~^:?*\[\\\0]{0,254}")
_VARIANT = re.compile(r"\w[\w.-]{0,63}", re.ASCII)  # it becomes part of file name patterns too


def is_revision(revision: str) -> bool:
    """Return whether `revision` can be the name of a branch, a tag or a commit."""
    return bool(_REVISION.fullmatch(revision))


def is_variant(variant: str) -> bool:
    """Return whether `variant` can be part of a weight file's name."""
    return bool(_VARIANT.fullmatch(variant))


Revision = Annotated[str, Predicate(is_revision), Wanted("a branch, tag or commit of the hub")]
Variant = Annotated[
    str, Predicate(is_variant), Wanted("a variant of the weights such as fp16, made of letters, digits, _, - and dots")
]


def is_file_name(name: str) -> bool:
    """Return whether `name` is a plain file name, without a path to another folder."""
    return name not in ("", ".", "..") and not re.search(r"[/\\:]", name)


def extensions_of(use_safetensors: bool | None) -> tuple[str, ...]:
    """Return the extensions of weight files to look for, the preferred one first.

    As in diffusers, True is safetensors alone, False is .bin alone, and None is both. A .bin is read as tensors alone.
    """
    checked("use_safetensors", use_safetensors, bool | None)
    return {None: ("safetensors", "bin"), True: ("safetensors",), False: ("bin",)}[use_safetensors]


def weights_name(extension: str, variant: str | None = None, library: Library = "diffusers") -> str:
    """Return a library's name for a file with all weights. `extension` is safetensors or bin."""
    return ".".join(filter(None, (STEMS[library][extension], variant, extension)))


def index_names(extension: str, variant: str | None = None, library: Library = "diffusers") -> list[str]:
    """Return a library's names for the index of sharded weights, newest first."""
    name = weights_name(extension, library=library)
    if variant is None:
        return [f"{name}.index.json"]
    return [f"{name}.index.{variant}.json", f"{name}.{variant}.index.json"]


def weight_names(extension: str, variant: str | None, library: Library) -> list[str]:
    """Return all names that a library gives to weight files and indices. The names of shards are patterns."""
    stem, shard = STEMS[library][extension], "-?????-of-?????"
    shards = [f"{stem}{shard}.{extension}"]
    if variant is not None:
        shards = [f"{stem}.{variant}{shard}.{extension}", f"{stem}{shard}.{variant}.{extension}"]
    return [weights_name(extension, variant, library), *index_names(extension, variant, library), *shards]

"""Names from outside that become parts of file names: none of them leads out of the folder that it belongs to.

Links that somebody placed in the folder may: the hub's cache is made of them.
"""

import re

from fastdiff.arguments import shown
from fastdiff.errors import InputError

WANTED_REVISION = "give a branch, tag or commit of the hub"
WANTED_VARIANT = "give a variant of the weights such as fp16, in letters, digits, _, - and dots"

# The hub's client keeps a file of a revision's name. git allows no others: see `git check-ref-format`.
_REVISION = re.compile(r"(?!.*(\.\.|//))[^\s/~^:?*\[\\\0][^\s~^:?*\[\\\0]{0,254}")
_VARIANT = re.compile(r"\w[\w.-]{0,63}", re.ASCII)  # it stands in patterns of file names too


def is_revision(revision: object) -> bool:
    """Whether it can be the name of a branch or tag, or a commit."""
    return isinstance(revision, str) and bool(_REVISION.fullmatch(revision))


def is_variant(variant: object) -> bool:
    """Whether it can stand in the name of a weights file."""
    return isinstance(variant, str) and bool(_VARIANT.fullmatch(variant))


def is_file_name(name: str) -> bool:
    """Whether it names something beside it, rather than elsewhere."""
    return name not in ("", ".", "..") and not re.search(r"[/\\:]", name)


def check_revision(revision: object) -> None:
    """InputError for a revision that none can have; None is none."""
    if revision is not None and not is_revision(revision):
        raise InputError(f"revision {shown(revision)}: {WANTED_REVISION}")


def check_variant(variant: object) -> None:
    """InputError for a variant that none can have; None is none."""
    if variant is not None and not is_variant(variant):
        raise InputError(f"variant {shown(variant)}: {WANTED_VARIANT}")

"""Check names from outside that become parts of file names: none may lead out of its folder.

Symbolic links in a folder may lead out of it: the hub's cache consists of them.
"""

import re
from typing import Annotated

from annotated_types import Predicate

from fastdiff.schema import Wanted

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

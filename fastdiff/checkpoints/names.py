"""Names from outside that become parts of file names: none of them leads out of the folder that it belongs to.

Links that somebody placed in the folder may: the hub's cache is made of them.
"""

import re
from typing import Annotated

from annotated_types import Predicate

from fastdiff.schema import Wanted

# The hub's client keeps a file of a revision's name. git allows no others: see `git check-ref-format`.
_REVISION = re.compile(r"(?!.*(\.\.|//))[^\s/~^:?*\[\\\0][^\s~^:?*\[\\\0]{0,254}")
_VARIANT = re.compile(r"\w[\w.-]{0,63}", re.ASCII)  # it stands in patterns of file names too


def is_revision(revision: str) -> bool:
    """Whether it can be the name of a branch or tag, or a commit."""
    return bool(_REVISION.fullmatch(revision))


def is_variant(variant: str) -> bool:
    """Whether it can stand in the name of a weights file."""
    return bool(_VARIANT.fullmatch(variant))


Revision = Annotated[str, Predicate(is_revision), Wanted("a branch, tag or commit of the hub")]
Variant = Annotated[
    str, Predicate(is_variant), Wanted("a variant of the weights such as fp16, in letters, digits, _, - and dots")
]


def is_file_name(name: str) -> bool:
    """Whether it names something beside it, rather than elsewhere."""
    return name not in ("", ".", "..") and not re.search(r"[/\\:]", name)

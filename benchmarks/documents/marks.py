"""Blocks of a Markdown document that a script writes, each between two markers::

<!-- table: models -->
...
<!-- end -->
"""

import re
from collections.abc import Callable

_BLOCK = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def names(text: str) -> list[str]:
    """Return the names of a document's blocks, in order."""
    return [found["name"] for found in _BLOCK.finditer(text)]


def filled(text: str, written: Callable[[str], str]) -> str:
    """Return the document with each block replaced by what `written` returns for its name."""
    return _BLOCK.sub(
        lambda found: f"<!-- table: {found['name']} -->\n\n{written(found['name'])}\n\n<!-- end -->", text
    )

"""Labels as parts of file names: each label of a model has a part of its own, which is the same in every run."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.requests.completion import Cell

_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)


def slug(label: str | int) -> str:
    """A label as part of a file name: lower-case word characters and dashes, at most 40, on every system."""
    if isinstance(label, int):
        return f"class{label}"
    words = re.sub(r"[\W_]+", "-", unicodedata.normalize("NFKC", label).lower()).strip("-")[:40].strip("-")
    return f"{words}-" if _WINDOWS_DEVICES.fullmatch(words) else words or "label"


def cell_names(cells: Sequence[Cell], info: ModelInfo) -> list[str | None]:
    """The label's part of each picture's name, None where it has no label.

    A picture that is asked for more than once, by a group and by its member, has -2, -3 ... behind it from the second
    time on.
    """
    parts = label_names(info, {cell.label for cell in cells if cell.label is not None})
    taken = {_key(part) for part in parts.values()}
    names: list[str | None] = []
    drawn: set[tuple[int, str | None]] = set()
    for cell in cells:
        part = name = None if cell.label is None else parts[cell.label]
        count = 1
        while part is not None and ((cell.seed, name) in drawn or (count > 1 and _key(name) in taken)):
            count += 1
            name = f"{part}-{count}"
        drawn.add((cell.seed, name))
        names.append(name)
    return names


def label_names(info: ModelInfo, asked: Iterable[int] = ()) -> dict[int, str]:
    """The name part of each label of a model by its index, and of those `asked` for that its list does not reach.

    Where the slugs of several agree ("c", "c++"), the first label keeps it, and the others have their index behind it.
    """
    slugs = {index: slug(info.label_name(index)) for index in sorted({*range(len(info.labels)), *asked})}
    first: dict[str, int] = {}
    for index, part in slugs.items():
        first.setdefault(_key(part), index)
    names, taken = {}, set(first)
    for index, part in slugs.items():
        if first[_key(part)] != index:
            while _key(part) in taken:
                part += f"-{index}"
            taken.add(_key(part))
        names[index] = part
    return names


def _key(part: str | None) -> str:
    """Equal texts for parts that a file system without upper and lower case takes for one."""
    return (part or "").casefold()

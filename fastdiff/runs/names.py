"""Labels and prompts as parts of file names.

Each label of a model has a part of its own, which is the same in every run; so has each prompt, but where it differs
from another one of its run in signs alone.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.requests.completion import Cell

_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)


_LONGEST = 40  # characters of a slug: of four bytes each they leave a name room for the rest
_HASH = 6  # hexadecimal digits behind the slug of a prompt that others may share


def slug(label: str | int, otherwise: str = "label") -> str:
    """A label as part of a file name: lower-case word characters and dashes, at most 40, on every system.

    `otherwise` stands for a text without any.
    """
    if isinstance(label, int):
        return f"class{label}"
    words = _words(label)[:_LONGEST].strip("-")
    return f"{words}-" if _WINDOWS_DEVICES.fullmatch(words) else words or otherwise


def _words(text: str) -> str:
    return re.sub(r"[\W_]+", "-", unicodedata.normalize("NFKC", text).lower()).strip("-")


def prompt_names(prompts: Iterable[str]) -> dict[str, str]:
    """The name part of each of a run's prompts: its slug.

    Digits of its SHA-256 stand behind it where the slug does not hold all words of the prompt or holds none, and where
    the slug is that of a prompt before it.
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    for prompt in dict.fromkeys(prompts):
        part = slug(prompt, "prompt")
        if _key(part) in taken or not 0 < len(_words(prompt)) <= _LONGEST:
            digits = hashlib.sha256(prompt.encode()).hexdigest()
            longer = (f"{part}-{digits[:count]}" for count in range(_HASH, len(digits) + 1))
            part = next(name for name in longer if _key(name) not in taken)
        taken.add(_key(part))
        names[prompt] = part
    return names


def cell_names(cells: Sequence[Cell], info: ModelInfo) -> list[str | None]:
    """The label's or the prompt's part of each picture's name, None where it has neither.

    A picture that is asked for more than once, by a group and by its member or by equal prompts, has -2, -3 ... behind
    it from the second time on.
    """
    of_prompts = prompt_names(cell.prompt for cell in cells if cell.prompt is not None)
    of_labels = label_names(info, {cell.label for cell in cells if cell.label is not None})
    taken = {_key(part) for part in (*of_prompts.values(), *of_labels.values())}
    names: list[str | None] = []
    drawn: set[tuple[int, str | None]] = set()
    for cell in cells:
        of_label = None if cell.label is None else of_labels[cell.label]
        part = name = of_label if cell.prompt is None else of_prompts[cell.prompt]
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

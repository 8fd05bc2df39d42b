"""Labels and prompts as parts of file names.

Each label of a model has its own part, which is the same in every run. So has each prompt, unless another prompt of the
run differs from it only in punctuation or letter case.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.requests.completion import Cell

_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)


_LONGEST = 40  # characters of a slug: at four bytes each, they leave room for the rest of a file name
_HASH = 6  # hexadecimal digits after the slug of a prompt that other prompts may share


def slug(label: str | int, otherwise: str = "label") -> str:
    """Return a label as part of a file name: at most 40 lower-case word characters and dashes, valid on every system.

    `otherwise` replaces a text without word characters.
    """
    if isinstance(label, int):
        return f"class{label}"
    words = _words(label)[:_LONGEST].strip("-")
    return f"{words}-" if _WINDOWS_DEVICES.fullmatch(words) else words or otherwise


def _words(text: str) -> str:
    return re.sub(r"[\W_]+", "-", unicodedata.normalize("NFKC", text).lower()).strip("-")


def prompt_names(prompts: Iterable[str]) -> dict[str, str]:
    """Return the name part of each prompt of a run: its slug.

    Digits of the prompt's SHA-256 follow if the slug lacks words of the prompt, has no words, or is already taken by an
    earlier prompt.
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
    """Return the label's or the prompt's part of each picture's name, or None if it has neither.

    The same picture may be requested repeatedly: by a group and its member, or by equal prompts. From the second time
    on, -2, -3 ... follow its part.
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
    """Return the name part of each label of a model by index, and of `asked` labels beyond the model's list of names.

    If several labels have the same slug ("c", "c++"), the first one keeps it, and the others append their index.
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
    """Return equal texts for parts that are equal on a file system that ignores case."""
    return (part or "").casefold()

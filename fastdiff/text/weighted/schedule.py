"""Prompts that change during a run, as in A1111: `[a:b:0.5]`, `[a:0.5]`, `[a::0.5]` and `[a|b]`. Imports no torch."""

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

from fastdiff.text.weighted.emphasis import check_open

_TOKEN = re.compile(r"\\.|[()\[\]:|]|[^\\()\[\]:|]+|\\", re.DOTALL)
_WHEN = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*", re.ASCII)
_CLOSES = {")": "(", "]": "["}


@dataclass(frozen=True)
class Switch:
    """`[before:after:when]`."""

    before: "Prompt"
    after: "Prompt"
    when: str  # a number; with a point it is a part of the run

    def chosen(self, step: int, steps: int) -> "Prompt":
        number = float(self.when)
        last = int(max(0, min(steps, number * steps if "." in self.when else number)))  # with `before`, counted from 1
        return self.before if step < last else self.after


@dataclass(frozen=True)
class Turns:
    """`[a|b]`: the choices take turns."""

    choices: tuple["Prompt", ...]

    def chosen(self, step: int, steps: int) -> "Prompt":
        return self.choices[step % len(self.choices)]


class Mark(NamedTuple):
    """A colon or a bar, which may separate the parts of a bracket."""

    text: str


Item = str | Mark | Switch | Turns


@dataclass(frozen=True)
class Prompt:
    """A prompt, or a part of it."""

    items: tuple[Item, ...]

    @property
    def changes(self) -> bool:
        """Whether the text depends on the step."""
        return any(isinstance(item, Switch | Turns) for item in self.items)

    def at(self, step: int, steps: int) -> str:
        """Return the text at a step, counted from 0, of a run of `steps` steps."""
        return "".join(
            item.chosen(step, steps).at(step, steps) if isinstance(item, Switch | Turns) else str(_plain(item))
            for item in self.items
        )


@functools.lru_cache(4096)
def parse_schedule(text: str) -> Prompt:
    """Parse the brackets that change with the step, as A1111's `get_learned_conditioning_prompt_schedules`.

    Other brackets, escapes and brackets without a partner stay as they are. A number with a point is a part of the run:
    0.5 is half of the steps. One without is a number of steps. Raises InputError for more than MOST_OPEN brackets
    inside one another.
    """
    frames: list[tuple[str, list[Item]]] = [("", [])]
    for token in _TOKEN.findall(text):
        if token in ("(", "["):
            frames.append((token, []))
            check_open(len(frames) - 1)
        elif token in _CLOSES and frames[-1][0] == _CLOSES[token]:
            opener, items = frames.pop()
            changes = opener == "[" and _changes(items)
            frames[-1][1].extend([_bracket(items)] if changes else [opener, *map(_plain, items), token])
        else:
            frames[-1][1].append(Mark(token) if token in (":", "|") else token)
    while len(frames) > 1:
        opener, items = frames.pop()
        frames[-1][1].extend([opener, *items])
    return Prompt(tuple(frames[0][1]))


def _plain(item: Item) -> Item:
    return item.text if isinstance(item, Mark) else item


def _changes(items: list[Item]) -> bool:
    return _switches(items) or Mark("|") in items


def _switches(items: list[Item]) -> bool:
    """Whether the inside of a bracket ends in `:when` after one or two parts."""
    last = items[-1] if items else None
    counts = items.count(Mark(":")) in (1, 2) and len(items) > 1 and items[-2] == Mark(":")
    return counts and isinstance(last, str) and _WHEN.fullmatch(last) is not None


def _bracket(items: list[Item]) -> Switch | Turns:
    if not _switches(items):
        return Turns(tuple(map(Prompt, _split(items, "|"))))
    *parts, (when,) = _split(items, ":")
    before, after = map(Prompt, parts if len(parts) == 2 else [(), *parts])
    return Switch(before, after, str(when).strip())


def _split(items: list[Item], mark: str) -> list[tuple[Item, ...]]:
    parts: list[list[Item]] = [[]]
    for item in items:
        if item == Mark(mark):
            parts.append([])
        else:
            parts[-1].append(item)
    return [tuple(part) for part in parts]

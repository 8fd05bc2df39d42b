"""Searching pictures: the words of a picture's settings, and what the user looks for."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_QUERY = 1000  # characters
_TEXTS = ("prompt", "label", "negative_prompt", "model", "scheduler", "dtype", "precision", "device")
_NUMBERS = {  # settings that can be searched by name and value, as in "seed 5"
    "seed": "seed",
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "eta": "eta",
    "clip_skip": "clip-skip",
    "width": "width",
    "height": "height",
}
_NUMBER = re.compile(rf"\b({'|'.join(_NUMBERS.values())})[ :=]+(-?\d+(?:\.\d+)?)(?![\w.])")


def words_of(record: Mapping[str, Any]) -> str:
    """Return the text in which `terms` are searched."""
    texts = [plain(str(value)) for name in _TEXTS for value in _values(record.get(name))]
    numbers = [f"{name}:{value:.15g}" for key, name in _NUMBERS.items() for value in _values(record.get(key))]
    return f" {' '.join([*texts, *numbers])} "


def terms(query: str) -> list[str]:
    """Return the texts that the words of a picture must all contain: numbers with their names, and the other words."""
    text = plain(query[:MAX_QUERY])
    numbers = [f" {name}:{float(number):.15g} " for name, number in _NUMBER.findall(text)]
    return numbers + _NUMBER.sub(" ", text).split()


def plain(text: str) -> str:
    """Return a text as it is compared: in one case, with single spaces, and without what UTF-8 cannot hold."""
    return " ".join(text.replace("\0", " ").casefold().encode(errors="replace").decode().split())


def _values(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list) else [] if value is None else [value]


@dataclass(frozen=True)
class Search:
    """The filters of the History tab; empty values show everything."""

    text: str = ""
    model: str = ""
    day: str = ""  # 2001-02-03
    only_favourites: bool = False

    @classmethod
    def of_page(cls, text: Any, model: Any, day: Any, only_favourites: Any) -> "Search":
        """Return the search in the fields of the page, which may send any values."""
        text, model, day = (value if isinstance(value, str) else "" for value in (text, model, day))
        return cls(text, model, day, only_favourites is True)

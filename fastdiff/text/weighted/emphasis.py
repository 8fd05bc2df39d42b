"""Weights in prompts, as in A1111: `(word:1.2)`, `((word))`, `[word]`, escapes and BREAK. Imports no torch."""

import math
import re
from typing import NamedTuple

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_PROMPT

ROUND, SQUARE = 1.1, 1 / 1.1  # the weights of a pair of brackets without a number
MOST_OPEN = 100  # brackets inside one another
MOST_WEIGHT = 1000.0
_TOKEN = re.compile(r"\\[()\[\]\\]|\\|\(|\[|:\s*([+-]?[.\d]+)\s*\)|\)|\]|[^\\()\[\]:]+|:")
_BREAK = re.compile(r"\s*\bBREAK\b\s*")
_AND = re.compile(r"\bAND\b")


class Part(NamedTuple):
    """A part of a prompt with one weight."""

    text: str
    weight: float = 1.0
    breaks: bool = False  # a BREAK, which ends the chunk and has no text


def check_prompt(text: str, name: str = "prompt") -> None:
    """Raise InputError for a prompt that is too long, and for AND, which combines prompts in A1111."""
    if len(text) > MAX_PROMPT:
        raise InputError(f"{name}: it has {len(text)} characters; a weighted prompt has at most {MAX_PROMPT}")
    if _AND.search(text):
        raise InputError(f"{name}: AND combines several prompts, which is not supported; write and, or BREAK")


def parse_emphasis(text: str) -> list[Part]:
    """Return the parts of a prompt with their weights, as A1111's `parse_prompt_attention`.

    Neighbours of one weight are one part. BREAK ends a chunk inside brackets too. Raises InputError for a weight that
    is no number or beyond MOST_WEIGHT, and for more than MOST_OPEN brackets inside one another.
    """
    parts: list[Part] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def close(bracket: str, weight: float) -> None:
        first = opened[bracket].pop()
        parts[first:] = [part._replace(weight=part.weight * weight) for part in parts[first:]]

    for match in _TOKEN.finditer(text):
        token, number = match[0], match[1]
        if token in opened:
            opened[token].append(len(parts))
            check_open(len(opened[token]))
        elif number is not None and opened["("]:
            close("(", _number(number))
        elif token == ")" and opened["("]:
            close("(", ROUND)
        elif token == "]" and opened["["]:
            close("[", SQUARE)
        elif token.startswith("\\"):
            parts.append(Part(token[1:]))
        else:
            first, *others = _BREAK.split(token)
            parts += [Part(first), *(each for other in others for each in (Part("", breaks=True), Part(other)))]
    for bracket, weight in (("(", ROUND), ("[", SQUARE)):
        while opened[bracket]:
            close(bracket, weight)
    return _merged(parts)


def check_open(count: int) -> None:
    """Raise InputError for more brackets inside one another than MOST_OPEN."""
    if count > MOST_OPEN:
        raise InputError(f"prompt: more than {MOST_OPEN} brackets inside one another; write the weight as (word:1.5)")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"prompt: the weight {shown(text)} is not a number; write (word:1.2), or \\( and \\) for brackets"
        ) from None


def _merged(parts: list[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if not math.isfinite(part.weight) or abs(part.weight) > MOST_WEIGHT:
            raise InputError(f"prompt: the weight of {shown(part.text)} is beyond {MOST_WEIGHT:g}; write a smaller one")
        last = merged[-1] if merged else None
        if last is not None and last.weight == part.weight and not last.breaks and not part.breaks:
            merged[-1] = last._replace(text=last.text + part.text)
        else:
            merged.append(part)
    return merged or [Part("")]

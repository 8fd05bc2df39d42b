"""Prompts that emoji-sd is judged by and shown with."""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from training.emoji_sd.captions import folded, plain_caption
from training.emoji_sd.data import Pictures, Splits, plain_names
from training.emoji_sd.evaluation.judge import judgeable

SEEN = 256  # training pictures whose captions are drawn
SHEET = 64  # prompts of the sheet, not picked
GRID = (  # names of training pictures, chosen before the first model was drawn from
    "cat face", "dog face", "red apple", "pizza", "rocket", "sunflower",
    "smiling face with heart-eyes", "smiling face with sunglasses", "crying face", "ghost", "clown face", "alien",
    "woman astronaut", "man cook", "baby", "eyes", "thumbs up", "red heart",
    "deciduous tree", "cactus", "mushroom", "butterfly", "octopus", "penguin",
    "house", "sailboat", "bus", "bicycle", "mountain", "crescent moon",
    "guitar", "soccer ball", "trophy", "key", "alarm clock", "flag: Japan",
)  # fmt: skip
NEW = (
    "green dog", "pizza with sunglasses", "blue heart on fire", "purple cat face", "robot with red heart",
    "snowman with cowboy hat", "pink elephant", "crying pizza", "blue apple", "ghost with guitar",
    "octopus astronaut", "yellow rocket",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Prompts with the names that their pictures should show, and the real pictures of the prompts."""

    prompts: tuple[str, ...]
    names: tuple[str, ...]
    images: Tensor  # (N, 3, 128, 128) uint8


def asked_of(pictures: Pictures, candidates: Sequence[str], most: int | None = None) -> Asked:
    """The plain captions of a split's pictures whose names are candidates, `most` of them drawn by a fixed seed."""
    rows = judgeable(pictures, candidates)
    if most is not None and most < len(rows):
        rows = sorted(random.Random(0).sample(rows, most))
    words = [pictures.words[row] for row in rows]
    return Asked(tuple(map(plain_caption, words)), tuple(word.name for word in words), pictures.images[rows])


def asked_sets(splits: Splits, candidates: Sequence[str], seen: int = SEEN) -> dict[str, Asked]:
    """The prompts of the splits, those of validation in two: a name of known words, and one with a word never read."""
    read = words_in(text for words in splits.train.words for text in (words.name, *words.keywords))
    known = [name for name in candidates if words_in([name]) <= read]
    new = [name for name in candidates if name not in known]
    sets = {
        "train": asked_of(splits.train, candidates, seen),
        "held_out": asked_of(splits.held_out, candidates),
        "known_words": asked_of(splits.validation, known),
        "new_words": asked_of(splits.validation, new),
    }
    return {name: asked for name, asked in sets.items() if asked.names}


def words_in(texts: Iterable[str]) -> set[str]:
    """The words of texts, folded and in lower case."""
    return {word for text in texts for word in re.findall(r"\w+", folded(text).lower())}


def sheet_prompts(splits: Splits) -> list[str]:
    """The first 64 names without a skin tone, in an order that a fixed seed draws: none is picked."""
    names = plain_names(splits.train.words)
    return [folded(name) for name in random.Random(1).sample(names, min(SHEET, len(names)))]

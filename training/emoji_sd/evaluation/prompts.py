"""Prompts for judging and for presenting emoji-sd."""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from training.emoji_sd.captions import folded, plain_caption
from training.emoji_sd.data import Pictures, Splits, plain_names
from training.emoji_sd.evaluation.judge import judgeable

SEEN = 256  # captions of training pictures to draw
SHEET = 64  # random prompts of the sheet
GRID = (  # names of training pictures, chosen before the first model drew anything
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
    """Prompts, the names that their pictures should show, and the real pictures for the prompts."""

    prompts: tuple[str, ...]
    names: tuple[str, ...]
    images: Tensor  # (N, 3, 128, 128) uint8


def asked_of(pictures: Pictures, candidates: Sequence[str], most: int | None = None) -> Asked:
    """Return the plain captions of pictures with candidate names, at most `most`, chosen by a fixed seed."""
    rows = judgeable(pictures, candidates)
    if most is not None and most < len(rows):
        rows = sorted(random.Random(0).sample(rows, most))
    words = [pictures.words[row] for row in rows]
    return Asked(tuple(map(plain_caption, words)), tuple(word.name for word in words), pictures.images[rows])


def asked_sets(splits: Splits, candidates: Sequence[str], seen: int = SEEN) -> dict[str, Asked]:
    """Return the prompts of the splits, with validation split by whether training captions have all words of a name."""
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
    """Return the words of the texts, folded and in lower case."""
    return {word for text in texts for word in re.findall(r"\w+", folded(text).lower())}


def sheet_prompts(splits: Splits) -> list[str]:
    """Return 64 names of training pictures without a skin tone, chosen by a fixed seed and not by hand."""
    names = plain_names(splits.train.words)
    return [folded(name) for name in random.Random(1).sample(names, min(SHEET, len(names)))]

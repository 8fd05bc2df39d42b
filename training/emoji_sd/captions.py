"""Captions of the pictures: varied ones for training and a plain one for judging, reproducible by seed.

A training caption is the name in one of its word orders, or keywords only. Most captions have style words, and some
names have up to four keywords. `caption_table` writes several captions per picture before the training, so that a batch
is one gather of token ids.
"""

import random
import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor

from training.emoji_sd.data import Words

STYLE_WORDS = {  # the plain caption has the first of each
    "fluent_3d": ("glossy 3D emoji", "3D emoji", "3D", "glossy 3D"),
    "fluent_flat": ("flat emoji", "flat", "Fluent flat emoji"),
    "noto": ("Noto emoji", "Noto"),
    "twemoji": ("Twemoji flat vector emoji", "Twemoji", "flat vector emoji"),
}
STYLED = 0.7  # share of captions with a style, half of them with its first words
STYLE_FIRST = 0.2  # share of those that begin with the style
KEYWORDS_ALONE = 0.15
KEYWORDS_TOO = 0.3
MOST_KEYWORDS = 4
UNFOLDED = 0.25  # share that keeps "piñata" and curly quotes, so that both spellings work
DROPPED = 0.1  # share of a batch's prompts that are empty, for guidance
QUOTES = str.maketrans("’‘“”", "''\"\"")


def plain_caption(words: Words) -> str:
    """Return a picture's caption for judging: "coconut, Twemoji flat vector emoji"."""
    return f"{folded(words.name)}, {STYLE_WORDS[words.style][0]}"


def varied_caption(words: Words, rng: random.Random) -> str:
    """Return one of a picture's captions, in the case of its words."""
    parts = _subject(words, rng)
    if rng.random() < STYLED:
        first, *others = STYLE_WORDS[words.style]
        style = first if rng.random() < 0.5 else rng.choice(others)
        parts = [style, *parts] if rng.random() < STYLE_FIRST else [*parts, style]
    elif rng.random() < 0.3:
        parts.append("emoji")
    caption = ", ".join(parts)
    return caption if rng.random() < UNFOLDED else folded(caption)


def caption_table(words: Sequence[Words], variants: int, seed: int) -> list[list[str]]:
    """Return `variants` captions of every picture; each depends only on its position in the table and the seed."""
    return [
        [varied_caption(word, random.Random(f"{seed} {row} {variant}")) for variant in range(variants)]
        for row, word in enumerate(words)
    ]


def drawn_prompts(ids: Tensor, empty: Tensor, pictures: Tensor, dropped: float = DROPPED) -> Tensor:
    """Draw a caption, or no words, for each picture: ids (N, V, L) integers, empty (L,), pictures (B,) -> (B, L) int64.

    dropped: the share of empty prompts. Draws from torch's default generator, without a read-back from the device.
    """
    count, device = len(pictures), pictures.device
    variant = torch.randint(ids.shape[1], (count,), device=device)
    is_empty = torch.rand(count, 1, device=device) < dropped
    return torch.where(is_empty, empty, ids[pictures, variant]).long()


def folded(text: str) -> str:
    """Return the text with straight quotes and without accents, as people type it."""
    letters = unicodedata.normalize("NFKD", text.translate(QUOTES))
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def _subject(words: Words, rng: random.Random) -> list[str]:
    keywords = rng.sample(words.keywords, min(rng.randint(1, MOST_KEYWORDS), len(words.keywords)))
    if rng.random() < KEYWORDS_ALONE and not words.is_toned:  # a toned picture's keywords do not name the tone
        return keywords
    name = rng.choice(_word_orders(words.name)) if rng.random() < 0.5 else words.name
    return [name, *keywords] if rng.random() < KEYWORDS_TOO else [name]


def _word_orders(name: str) -> list[str]:
    """Return the ways to say a name: "flag: Chad" is also "Chad flag" and "flag of Chad"."""
    subject, colon, detail = name.partition(": ")
    if not colon:
        return [name, f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"]
    orders = [name, f"{detail} {subject}", f"{subject}, {detail}"]
    joint = {"flag": "of", "family": "with"}.get(subject, "with" if "skin tone" in detail else None)
    return [*orders, f"{subject} {joint} {detail}" if joint else f"{subject} {detail}"]

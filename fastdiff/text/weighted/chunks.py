"""Chunks: a weighted prompt of any length as inputs of a text encoder, as A1111 splits it. Imports no torch."""

import unicodedata
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from fastdiff.errors import InputError
from fastdiff.text.tokenizer import CLIPTokenizer
from fastdiff.text.weighted.emphasis import parse_emphasis

MOST_CHUNKS = 64
BACKTRACK = 20  # tokens; a chunk that is full ends at its last comma if that is so near

Token = tuple[int, float]  # an id, and its weight


class Chunk(NamedTuple):
    """One input of a text encoder."""

    ids: tuple[int, ...]  # `CLIPTokenizer.length`: the start token, the prompt's tokens, the end token, padding
    weights: tuple[float, ...]  # one for each id; 1 for the tokens that are not the prompt's


def split_chunks(prompt: str, tokenizer: CLIPTokenizer) -> list[Chunk]:
    """Return the chunks of a weighted prompt, at least one. Raises InputError as `parse_emphasis`, and for too
    many chunks.

    A chunk has up to `tokenizer.room` of the prompt's tokens, 75 with CLIP. The vectors of an embedding stay in one.
    """
    chunks: list[list[Token]] = [[]]
    comma, (comma_id, *_) = -1, tokenizer.ids(",")  # `comma`: the place of the chunk's last comma
    for part in parse_emphasis(prompt):
        if part.breaks:
            chunks.append([])
            comma = -1
            continue
        for ids in _words(part.text, tokenizer):
            chunk, room = chunks[-1], tokenizer.room
            if ids[0] == comma_id:
                comma = len(chunk)
            elif len(chunk) == room and comma >= 0 and room - comma <= BACKTRACK:
                chunks.append(chunk[comma + 1 :])
                del chunk[comma + 1 :]
                comma = -1
            if len(chunks[-1]) + len(ids) > room:
                chunks.append([])
                comma = -1
            chunks[-1] += [(each, part.weight) for each in ids]
    if len(chunks) > 1 and not chunks[-1]:
        chunks.pop()
    if len(chunks) > MOST_CHUNKS:
        raise InputError(f"prompt: it has {len(chunks)} chunks of {tokenizer.room} tokens; give at most {MOST_CHUNKS}")
    return [_filled(chunk, tokenizer) for chunk in chunks]


def may_have_too_many(prompt: str, tokenizer: CLIPTokenizer) -> bool:
    """Return whether a prompt may have more than MOST_CHUNKS chunks. Much faster than `split_chunks`."""
    tokens = len(unicodedata.normalize("NFC", prompt).lower().encode(errors="replace"))  # each has a byte or more
    fewest = max(1, tokenizer.room - BACKTRACK)  # tokens of a chunk that is full
    return bool(tokenizer.embeddings) or 1 + prompt.count("BREAK") + tokens / fewest > MOST_CHUNKS


def empty_chunk(tokenizer: CLIPTokenizer) -> Chunk:
    """Return the chunk of a prompt without text."""
    return _filled([], tokenizer)


def _words(text: str, tokenizer: CLIPTokenizer) -> Iterator[tuple[int, ...]]:
    """Yield the ids of a text one by one, and the ids of an embedding's vectors together."""
    ids, place = tokenizer.ids(tokenizer.expand(text)), 0
    vectors = tokenizer.embeddings.values()
    firsts = dict(zip(accumulate(vectors, initial=tokenizer.size), vectors, strict=False))
    while place < len(ids):
        count = firsts.get(ids[place], 1)
        yield tuple(ids[place : place + count])
        place += count


def _filled(tokens: list[Token], tokenizer: CLIPTokenizer) -> Chunk:
    ids = (tokenizer.start, *(each for each, _ in tokens), tokenizer.end)
    weights = (1.0, *(weight for _, weight in tokens), 1.0)
    missing = tokenizer.length - len(ids)
    return Chunk(ids + (tokenizer.pad,) * missing, weights + (1.0,) * missing)

"""Check weighted prompts before anything is drawn. Imports no torch."""

import re
from collections.abc import Iterable, Sequence

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.requests.syntax import check_loras, check_no_loras
from fastdiff.text.tokenizer import CLIPTokenizer
from fastdiff.text.weighted.chunks import MOST_CHUNKS, may_have_too_many, split_chunks
from fastdiff.text.weighted.emphasis import check_prompt, parse_emphasis
from fastdiff.text.weighted.schedule import parse_schedule

LONG = 4 * MOST_CHUNKS  # characters; a shorter text has no more chunks, if a chunk has 75 tokens
_SYNTAX = re.compile(r"[()\[\]\\<]")


def check_weighted(
    text: str,
    name: str = "prompt",
    steps: int = 1,
    loras: Sequence[str] | None = None,
    tokenizers: Sequence[CLIPTokenizer] = (),
) -> None:
    """Raise InputError for a weighted prompt that cannot be read, at any of the steps of a run.

    loras: the names that its tags may have; None: it may have no tags. tokenizers: of the model that reads it.
    """
    check_prompt(text, name)
    texts = [text]
    if _SYNTAX.search(text):
        texts = _texts_of(_without_tags(text, name, loras), steps)
    for each in texts:
        for tokenizer in tokenizers:
            if may_have_too_many(each, tokenizer):
                split_chunks(each, tokenizer)


def _without_tags(text: str, name: str, loras: Sequence[str] | None) -> str:
    if loras is not None:
        return check_loras(text, loras)
    check_no_loras(text, name)
    return text


def _texts_of(text: str, steps: int) -> list[str]:
    """Return the texts of the steps. Raises InputError for one that cannot be read."""
    schedule = parse_schedule(text)
    texts = sorted({schedule.at(step, steps) for step in range(steps)} if schedule.changes else ())
    for each in (text, *texts):
        parse_emphasis(each)
    return texts or [text]


def check_all(
    texts: Iterable[str],
    name: str,
    steps: int,
    loras: Sequence[str] | None = None,
    tokenizers: Sequence[CLIPTokenizer] = (),
) -> None:
    """Check the weighted prompts of a run. Of several, the error quotes the one that cannot be read."""
    different = dict.fromkeys(texts)
    for text in different:
        try:
            check_weighted(text, name, steps, loras, tokenizers)
        except InputError as error:
            if len(different) == 1:
                raise
            raise InputError(f"{error} (in {shown(text)})") from None

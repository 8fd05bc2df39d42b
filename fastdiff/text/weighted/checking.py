"""Check weighted prompts before anything is drawn. Imports no torch."""

import re
from collections.abc import Iterable

from fastdiff.arguments import shown
from fastdiff.errors import InputError
from fastdiff.text.weighted.emphasis import check_prompt, parse_emphasis
from fastdiff.text.weighted.loras import check_no_loras
from fastdiff.text.weighted.schedule import parse_schedule

_SYNTAX = re.compile(r"[()\[\]\\<]")


def check_weighted(text: str, name: str = "prompt", steps: int = 1) -> None:
    """Raise InputError for a weighted prompt that cannot be read, at any of the steps of a run."""
    check_prompt(text, name)
    if not _SYNTAX.search(text):
        return
    check_no_loras(text, name)
    schedule = parse_schedule(text)
    texts = {schedule.at(step, steps) for step in range(steps)} if schedule.changes else ()
    for each in (text, *sorted(texts)):
        parse_emphasis(each)


def check_all(texts: Iterable[str], name: str, steps: int) -> None:
    """Check the weighted prompts of a run. Of several, the error quotes the one that cannot be read."""
    different = dict.fromkeys(texts)
    for text in different:
        try:
            check_weighted(text, name, steps)
        except InputError as error:
            if len(different) == 1:
                raise
            raise InputError(f"{error} (in {shown(text)})") from None

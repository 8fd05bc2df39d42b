"""Outcomes of a call through a door: success ("done") or a refusal, and the broken promises."""

import functools
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdiff.errors import InputError, NonFiniteError

REFUSALS = (InputError, NonFiniteError)
# Python's own messages for wrong argument names
_UNBOUND = re.compile(r"unexpected keyword argument|missing \d+ required|multiple values|keywords must be strings")


@dataclass
class Outcome:
    """The result of a call through a door."""

    is_done: bool
    said: str = ""
    problems: list[str] = field(default_factory=list)


Options = tuple[tuple[str, str], ...]  # (argument, name of its value) or (flag, word)


def guarded(run: Callable[..., str | list[str]]) -> Callable[..., Outcome]:
    """Turn a door's function, which returns broken promises, into one that returns an outcome and never raises."""

    @functools.wraps(run)
    def door(*args: Any) -> Outcome:
        try:
            problems = run(*args)
        except REFUSALS as error:
            return Outcome(False, str(error), ["a refusal of several lines"] if "\n" in str(error) else [])
        except Exception as error:
            if isinstance(error, TypeError) and _UNBOUND.search(str(error)):
                return Outcome(False, str(error))
            return Outcome(False, str(error), [said_of(error)])
        return Outcome(True, "", list(problems))

    return door


def _is_of_fuzz(file: str) -> bool:
    return Path(file).is_relative_to(Path(__file__).parents[1])


def said_of(error: BaseException) -> str:
    """Return one line: the type of an error, and the last place in our code in its traceback."""
    # `lookup_lines`: reading the source would count as the case's own reading
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    ours = [frame for frame in frames if "fastdiff" in frame.filename and not _is_of_fuzz(frame.filename)]
    place = f"{'/'.join(Path(ours[-1].filename).parts[-2:])}:{ours[-1].name}" if ours else "the door itself"
    return f"raised {type(error).__name__} in {place}: {' '.join(str(error).split())[:160]}"

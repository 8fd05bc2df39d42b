"""Styles: named texts that are added to prompts, from a styles.csv as AUTOMATIC1111 writes it. Imports no torch."""

import csv
import io
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Len

from fastdiff.arguments import SHOWN, did_you_mean, naming, path, shown, text
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_PROMPT, Prompt
from fastdiff.requests.prompt_file import read_text
from fastdiff.schema import Wanted, checked

MAX_BYTES = 2**22  # 4 MB; a file of 1,000 styles has 0.3 MB
MAX_NAMES = 100  # styles of one prompt
PLACE = "{prompt}"  # where the prompt goes in the text of a style
_COLUMNS = "name,prompt,negative_prompt"
_Names = Annotated[tuple[str, ...], Len(0, MAX_NAMES), Wanted(f"a list of up to {MAX_NAMES} names of styles")]


@dataclass(frozen=True)
class Style:
    """A style: the texts that it adds to a prompt and to a negative prompt; "" adds nothing."""

    name: str
    prompt: str = ""
    negative_prompt: str = ""


class Styles:
    """The styles of a file.

    Args:
        styles: the styles. Their names differ.
        source: the name of their file in errors.
    """

    def __init__(self, styles: Iterable[Style] = (), source: str = "styles") -> None:
        self.source = source
        self._by_name: dict[str, Style] = {}
        for style in styles:
            if style.name in self._by_name:
                raise InputError(f"style {shown(style.name)} is there twice; rename one of the two")
            self._by_name[style.name] = style

    @classmethod
    def read(cls, file: str | os.PathLike) -> "Styles":
        """Read the styles of a CSV file.

        The columns are `name`, `prompt` and `negative_prompt`, as in AUTOMATIC1111's `modules/styles.py`. Like there,
        `text` is an old name of `prompt`, `negative_prompt` may be missing, other columns are ignored, and a name that
        begins with # starts a comment.

        Args:
            file: a UTF-8 file of up to 4 MB.

        Raises InputError for a file that cannot be read, lacks a column or has a name twice.
        """
        file = os.fspath(path("styles", file))
        content = read_text(file, "styles", f"a CSV file with the columns {_COLUMNS}", "as CSV", MAX_BYTES, "styles")
        try:
            with naming(f"styles {file}"):
                return cls(_styles(content), file)
        except csv.Error as error:
            raise InputError(f"styles {file} is not a valid CSV file ({error}); correct it") from None

    @property
    def names(self) -> list[str]:
        """The names of the styles, in the order of the file."""
        return list(self._by_name)

    @property
    def listed(self) -> str:
        """The names in one line, as far as they fit."""
        return textwrap.shorten(", ".join(self.names), SHOWN, placeholder=" ...")

    def apply(self, names: Sequence[str], prompt: str, negative_prompt: str = "") -> tuple[str, str]:
        """Return the prompt and the negative prompt with the styles `names` applied, one after the other.

        As in AUTOMATIC1111, `{prompt}` in the text of a style is replaced by the prompt; a text without it follows the
        prompt after a comma. The negative prompt changes in the same way.

        Raises InputError for an unknown name, and for a result of more than 10,000 characters.
        """
        for name in checked("style", names, _Names):
            style = self._named(name)
            prompt = _merged(style.prompt, checked("prompt", prompt, Prompt))
            negative_prompt = _merged(style.negative_prompt, checked("negative_prompt", negative_prompt, Prompt))
            if max(len(prompt), len(negative_prompt)) > MAX_PROMPT:
                raise InputError(
                    f"style {shown(name)} makes the prompt longer than {MAX_PROMPT} characters; shorten it"
                )
        return prompt, negative_prompt

    def _named(self, name: str) -> Style:
        if name not in self._by_name:
            hint = did_you_mean(name, self.names) or f"choose from {self.listed}"
            raise InputError(f"style {shown(name)} is not in {self.source}; {hint}")
        return self._by_name[name]


def _merged(style: str, prompt: str) -> str:
    """Return AUTOMATIC1111's `merge_prompts`."""
    if PLACE in style:
        return style.replace(PLACE, prompt)
    return ", ".join(filter(None, (prompt.strip(), style.strip())))


def _styles(content: str) -> Iterator[Style]:
    """Yield the styles of a CSV text. Raises InputError and csv.Error."""
    rows = csv.DictReader(io.StringIO(content, newline=""), skipinitialspace=True, strict=True)
    columns = rows.fieldnames or ()
    prompt = next((each for each in ("prompt", "text") if each in columns), None)
    if prompt is None or "name" not in columns:
        missing = "name" if "name" not in columns else "prompt"
        raise InputError(f"it has no column {missing}; its first line must be {_COLUMNS}")
    for row in rows:
        with naming(f"line {rows.line_num}"):
            style = _style(row, prompt)
        if style is not None:
            yield style


def _style(row: Mapping[Any, Any], prompt: str) -> Style | None:
    """Return the style in a row of the file; None for a comment and for an empty row."""
    if None in row:
        raise InputError("it has more values than the first line; put texts with commas in double quotes")
    name = row["name"] or ""
    if name.startswith("#") or not any(row.values()):
        return None
    if not name.strip():
        raise InputError("the style has no name; write one in the column name")
    texts = {key: row.get(column) or "" for key, column in (("prompt", prompt), ("negative_prompt", "negative_prompt"))}
    return Style(text("name", name), **{key: checked(key, value, Prompt) for key, value in texts.items()})

"""fastdiff.json: what a model folder says about its labels and how it samples best. Every key is optional."""

import difflib
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fastdiff.config import from_mapping, read_json
from fastdiff.errors import InputError

FILE_NAME = "fastdiff.json"
SCHEDULERS = ("ddim", "ddpm")

_INDEX = re.compile(r"\s*[+-]?[0-9]{1,9}\s*")


@dataclass(frozen=True)
class ModelInfo:
    """The labels of a class-conditional model and the sampling options that suit it; None leaves an option open."""

    labels: tuple[str, ...] = ()  # the name of label i is labels[i]
    null_label: int | None = None  # the label that stands for "no label": guidance needs it
    guidance_scale: float | None = None
    num_inference_steps: int | None = None
    scheduler: str | None = None  # ddim, ddpm
    eta: float | None = None  # of DDIM, 0 to 1
    use_clipped_model_output: bool | None = None  # of DDIM

    @classmethod
    def from_folder(cls, folder: str | Path, num_classes: int | None = None) -> "ModelInfo":
        """Read `folder`/fastdiff.json; without that file every field keeps its default.

        `num_classes` is the size of the model's label table, where the caller knows it. Raises InputError for an
        unknown key, a value of the wrong type or out of range, two labels of one name, and labels beyond the table.
        """
        path = Path(folder) / FILE_NAME
        if not path.exists():
            return cls()
        info = from_mapping(cls, read_json(path), source=str(path))
        for problem in (*info._wrong_options(), *info._wrong_labels(num_classes)):
            raise InputError(f"{path}: {problem}")
        return info

    def label_index(self, label: int | str, num_classes: int | None = None) -> int:
        """The index of `label`: an index, an index in digits, or a name.

        A name is compared as lower-case words, so "noto animals", "Noto/Animals" and "noto_animals" are one label,
        and a beginning is enough when only one name begins so ("twemoji fl"). A text that is exactly a label's name
        is that label even when it is made of digits. `num_classes` bounds the index, where the caller knows it.
        Raises InputError that lists close names, or the range of the index.
        """
        if isinstance(label, str) and (label in self.labels or not _INDEX.fullmatch(label)):
            return self._named(label)
        size = self._num_labels() if num_classes is None else num_classes
        index = int(label)
        if not 0 <= index < size:
            raise InputError(f"label {label} is out of range; this model has labels 0 to {size - 1}")
        return index

    def _named(self, label: str) -> int:
        if not self.labels:
            raise InputError(f"label {label!r}: this model does not name its labels; give an index")
        asked, names = _words(label), [_words(name) for name in self.labels]
        matches = (
            [i for i, name in enumerate(self.labels) if name == label]
            or [i for i, name in enumerate(names) if name == asked]
            or [i for i, name in enumerate(names) if asked and name.startswith(asked)]
        )
        if len(matches) == 1:
            return matches[0]
        close = [self.labels[i] for i in matches] or [
            self.labels[names.index(name)] for name in difflib.get_close_matches(asked, names, n=4, cutoff=0.5)
        ]
        problem = "fits several labels" if matches else "is not a label of this model"
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise InputError(f"label {label!r} {problem}; {hint}`fastdiff models MODEL` lists them all")

    def _num_labels(self) -> int:
        return max(len(self.labels), 0 if self.null_label is None else self.null_label + 1)

    def _wrong_options(self):
        if not _is_integer(self.num_inference_steps, least=1):
            yield f"num_inference_steps is {self.num_inference_steps!r}, not a whole number of at least 1"
        if not _is_number(self.guidance_scale):
            yield f"guidance_scale is {self.guidance_scale!r}, not a number of at least 0"
        if not _is_number(self.eta, most=1.0):
            yield f"eta is {self.eta!r}, not a number from 0 to 1"
        if self.scheduler not in (None, *SCHEDULERS):
            yield f"scheduler is {self.scheduler!r}, not one of {', '.join(SCHEDULERS)}"
        if not isinstance(self.use_clipped_model_output, bool | None):
            yield f"use_clipped_model_output is {self.use_clipped_model_output!r}, not true or false"

    def _wrong_labels(self, num_classes: int | None):
        if not isinstance(self.labels, tuple) or not all(isinstance(name, str) and name for name in self.labels):
            yield "labels is not a list of names"
            return
        twice = [name for name, count in Counter(self.labels).items() if count > 1]
        if twice:
            yield f"labels holds {', '.join(twice)} more than once; each label needs a name of its own"
        if not _is_integer(self.null_label, least=0):
            yield f"null_label is {self.null_label!r}, not a whole number of at least 0"
        elif num_classes is not None and self._num_labels() > num_classes:
            yield f"labels go up to {self._num_labels() - 1}, but the model's label table ends at {num_classes - 1}"


def _words(name: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", name.casefold()))


def _is_integer(value: object, least: int) -> bool:
    return value is None or (type(value) is int and value >= least)


def _is_number(value: object, most: float = math.inf) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value) and 0 <= value <= most)

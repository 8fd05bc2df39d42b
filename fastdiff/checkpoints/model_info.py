"""ModelInfo: a model's labels, example prompts and best sampling options, from fastdiff.json. All keys are optional."""

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len

from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.registry import PIPELINES, PipelineClass
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_LABELS, Fraction, Label, NotNegative, Prompt, Steps
from fastdiff.sampler_names import SchedulerName
from fastdiff.schema import Schema, Wanted

LabelName = Annotated[str, Len(1), Wanted("a name")]

FILE_NAME = "fastdiff.json"
SHOWN = 8  # suggestions for an unknown label
MAX_EXAMPLES = 100  # prompts

_INDEX = re.compile(r"\s*[+-]?[0-9]{1,9}\s*")


@dataclass(frozen=True)
class ModelInfo(Schema):
    """A model's labels or example prompts, and the sampling options that suit it. None means not set."""

    # labels[i] is the name of label i; None: label i has no name
    labels: Annotated[tuple[LabelName | None, ...], Len(0, MAX_LABELS)] = ()
    # A group's name -> the names of its labels
    label_groups: dict[str, Annotated[tuple[LabelName, ...], Len(1, MAX_LABELS)]] = field(default_factory=dict)
    replaced_labels: dict[str, str] = field(default_factory=dict)  # an earlier model's label -> its replacement
    # Examples; the first ones are drawn if none is given
    prompts: Annotated[tuple[Prompt, ...], Len(0, MAX_EXAMPLES)] = ()
    null_label: Label | None = None  # the label that means "no label"; guidance needs it
    guidance_scale: NotNegative | None = None
    guidance_scale_with_mask: NotNegative | None = None  # of inpainting; None: guidance_scale
    num_inference_steps: Steps | None = None
    scheduler: SchedulerName | None = None
    eta: Fraction | None = None  # of DDIM, and of `scheduler` if that takes it
    use_clipped_model_output: bool | None = None  # of DDIM

    @classmethod
    def from_folder(
        cls, folder: str | Path, num_classes: int | None = None, null_label: int | None = None
    ) -> "ModelInfo":
        """Read `folder`/fastdiff.json. Missing keys get the defaults of diffusers' pipeline, or else of this class.

        `num_classes` is the size of the model's label table, if known; `null_label` is the default null label. Raises
        InputError for an unknown key, a value of the wrong type or out of range, two labels with the same name, and
        labels beyond the table. Names from a DiTPipeline's model_index.json are used if they fit and never raise.
        """
        path = Path(folder) / FILE_NAME
        defaults = _pipeline_defaults(Path(folder) / "model_index.json", num_classes)
        said = read_json(path) if path.exists() else {}
        if "guidance_scale" in said:
            defaults["guidance_scale_with_mask"] = None
        info = cls.from_mapping({"null_label": null_label} | defaults | said, path)
        last = info._num_labels() - 1
        if num_classes is not None and last >= num_classes:
            raise InputError(f"{path}: labels go up to {last}, but the model's label table ends at {num_classes - 1}")
        return info

    @classmethod
    def of_pipeline(cls, name: str) -> "ModelInfo":
        """Return the defaults of diffusers' pipeline class of this name."""
        return cls(**_guidance(PIPELINES[name]))

    def check(self) -> None:
        twice = [name for name, count in Counter(filter(None, self.labels)).items() if count > 1]
        if twice:
            raise InputError(f"labels holds {', '.join(twice)} more than once; make label names unique")
        labels = set(self.labels)
        for group, names in self.label_groups.items():
            unknown = [name for name in names if name not in labels]
            if unknown:
                raise InputError(
                    f"label_groups: {group!r} holds {', '.join(unknown)}, not in labels; correct it, or add a label"
                )
            if group in labels and names != (group,):
                raise InputError(f"label_groups: {group!r} is a label already; give the group another name")

    def label_name(self, index: int) -> str | int:
        """Return the name of label `index`, or the index if it has no name."""
        name = self.labels[index] if index < len(self.labels) else None
        return index if name is None else name

    def label_index(self, label: int | str, num_classes: int | None = None, seed: int = 0) -> int:
        """Return the index that `label` stands for in the picture of this seed; see `label_choices`."""
        choices = self.label_choices(label, num_classes)
        return choices[seed % len(choices)]

    def label_choices(self, label: int | str, num_classes: int | None = None) -> tuple[int, ...]:
        """Return the indices that `label` stands for: one index, or all indices of a group.

        A group's labels take turns from seed to seed. `label` is an index, an index as digits, or a name:

        - Names are compared as lower-case words: "noto animals", "Noto/Animals" and "noto_animals" are the same.
        - Each synonym is a name: "tench" and "Tinca tinca" both find "tench, Tinca tinca".
        - A beginning is enough if only one name has it: "twemoji fl".
        - A text of digits is a label's name if it equals one exactly, and otherwise an index.

        `num_classes` is the size of the label table, if known. Raises InputError that lists close names, or the range
        of the index.
        """
        if isinstance(label, str) and (label in self.labels or not _INDEX.fullmatch(label)):
            name = self._full_name(label)
            indices = {each: index for index, each in enumerate(self.labels)}
            return tuple(indices[each] for each in self.label_groups.get(name, (name,)))
        size = self._num_labels() if num_classes is None else num_classes
        index = int(label)
        if not 0 <= index < size:
            raise InputError(f"label {label} is out of range; this model has labels 0 to {size - 1}")
        return (index,)

    def _full_name(self, label: str) -> str:
        """Return the name of the only label or group that `label` can mean."""
        names = list(dict.fromkeys([*filter(None, self.labels), *self.label_groups]))
        if not names:
            raise InputError(f"label {label!r}: this model does not name its labels; give an index")
        asked, words = _words(label), [_words(name) for name in names]
        matches = (
            [name for name in names if name == label]
            or [name for name, known in zip(names, words, strict=True) if known == asked]
            or [name for name in names if asked and asked in map(_words, name.split(","))]
            or [name for name, known in zip(names, words, strict=True) if asked and known.startswith(asked)]
        )
        if len(matches) == 1:
            return matches[0]
        replaced = {_words(old): new for old, new in self.replaced_labels.items()}
        if asked in replaced:
            raise InputError(f"label {label!r} is no longer a label of this model; use {replaced[asked]}")
        close = matches or [names[words.index(near)] for near in difflib.get_close_matches(asked, words, 4, 0.5)]
        problem = "fits several labels" if matches else "is not a label of this model"
        hint = f"did you mean {', '.join(close[:SHOWN])}? " if close else ""
        raise InputError(f"label {label!r} {problem}; {hint}`fastdiff models MODEL` lists them all")

    def _num_labels(self) -> int:
        return max(len(self.labels), 0 if self.null_label is None else self.null_label + 1)


def _pipeline_defaults(path: Path, num_classes: int | None) -> dict[str, Any]:
    """Return the defaults of the folder's pipeline: its class's guidance scales, and its names of the labels."""
    index = read_json(path) if path.exists() else {}
    name = index.get("_class_name")
    pipeline = PIPELINES.get(name) if isinstance(name, str) else None
    if pipeline is None:
        return {}
    id2label = index.get("id2label") if "id2label" in pipeline.options else None
    return _guidance(pipeline) | {"labels": _label_names(id2label, num_classes or 0)}


def _guidance(pipeline: PipelineClass) -> dict[str, Any]:
    return {name: getattr(pipeline, name) for name in ("guidance_scale", "guidance_scale_with_mask")}


def _label_names(id2label: Any, num_classes: int) -> tuple[str | None, ...]:
    """Return the name of each label of the table, from {"0": "tench, Tinca tinca", ...}; () if none has a name.

    As in diffusers' DiTPipeline, labels may lack a name, and several keys may name one label ("7", "07"). Entries that
    name no label of the table are skipped. ImageNet has two cranes; the second one becomes "crane (517)".
    """
    names: dict[int, str] = {}
    for key, name in id2label.items() if isinstance(id2label, Mapping) else ():
        index = _as_index(key)
        if index is not None and 0 <= index < num_classes and isinstance(name, str) and name:
            names[index] = f"{names[index]}, {name}" if index in names else name
    taken: set[str] = set()
    for index in sorted(names):
        while names[index] in taken:
            names[index] += f" ({index})"
        taken.add(names[index])
    return tuple(names.get(index) for index in range(num_classes)) if names else ()


def _as_index(key: str) -> int | None:
    try:
        return int(key)
    except ValueError:
        return None


def _words(name: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", name.casefold()))

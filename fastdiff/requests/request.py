"""A request: flags, or the settings of a PNG, checked by one set of rules.

Imports nothing heavy: all of this happens before torch is imported.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Interval, Len, Predicate

from fastdiff.arguments import shown
from fastdiff.checkpoints.kinds import MAX_SEED, Fraction, Label, NotNegative, Seed, Steps
from fastdiff.checkpoints.names import Revision, Variant
from fastdiff.checkpoints.registry import SchedulerName
from fastdiff.errors import InputError
from fastdiff.requests import defaults, png
from fastdiff.schema import Schema, Wanted, wanted

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(DtypeName)
MAX_PICTURES = 50_000  # of one run: as many as FID is computed on

# A flag that replaces the first drops the recorded values that only made sense with it.
_DEPENDENTS = {"model": ("revision", "variant", "horizon"), "scheduler": ("eta", "use_clipped_model_output")}


def _all_differ(values: tuple[Any, ...]) -> bool:
    return len(set(values)) == len(values)


ModelName = Annotated[
    str, Len(1), Predicate(lambda name: "\0" not in name), Wanted("a bundled name, a folder or a hub id")
]
LabelNames = Annotated[tuple[Label | str, ...], Wanted("the name or index of a label")]
SeedList = Annotated[tuple[Seed, ...], Len(1, MAX_PICTURES), Predicate(_all_differ)]
Seeds = Annotated[
    Seed | Literal["random"] | SeedList,
    Wanted(f"a seed from 0 to {MAX_SEED}, a list of different ones such as 1,2,5-10, or random"),
]
Pictures = Annotated[int, Interval(ge=1, le=MAX_PICTURES)]


@dataclass(frozen=True)
class Request(Schema):
    """The pictures of one run: `label` x `seed`. None leaves a choice to the model; `complete` fills it in.

    Raises InputError for a value that is not of its field's kind, whether it came from a flag or from a file.
    """

    SHOWN_AS: ClassVar = {"num_inference_steps": "steps", "guidance_scale": "cfg-scale", "num_images": "num-images"}

    model: ModelName = defaults.MODEL
    revision: Revision | None = None
    variant: Variant | None = None
    scheduler: SchedulerName | None = None
    num_inference_steps: Steps | None = None
    eta: Fraction | None = None
    use_clipped_model_output: bool | None = None
    guidance_scale: NotNegative | None = None
    dtype: DtypeName = defaults.DTYPE
    horizon: Annotated[int, Interval(ge=1)] | None = None
    label: LabelNames = ()
    seed: Seeds = defaults.SEED
    num_images: Pictures | None = None

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], source: str | None = None) -> "Request":
        """The `flags` that are given (not None), over the settings in the PNG `source` where one is named."""
        names = {setting.name for setting in fields(cls)}
        given = {name: value for name, value in flags.items() if name in names and value is not None}
        given |= {"label": tuple(given["label"])} if "label" in given else {}
        given |= {"seed": parse_seed(given["seed"])} if "seed" in given else {}
        if source is None:
            return cls(**given)
        record = png.read_settings(source)
        try:
            kept = names & record.keys() - {"num_images"}
            recorded = cls(**{name: _from_json(name, record[name]) for name in kept})
        except InputError as error:
            raise InputError(f"{source} holds settings that cannot be used: {error}") from None
        if "num_images" in given and isinstance(recorded.seed, tuple) and len(recorded.seed) == 1:
            given.setdefault("seed", recorded.seed[0])
        dropped = {name: None for key in _DEPENDENTS for name in _DEPENDENTS[key] if _replaced(key, given, recorded)}
        return replace(recorded, **{**dropped, **given})

    def as_record(self) -> dict[str, Any]:
        """The part of a completed request that all pictures of a run share, as a PNG keeps it."""
        own = {"label", "seed", "num_images"} | ({"horizon"} if self.horizon is None else set())
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}


def _replaced(key: str, given: Mapping[str, Any], recorded: Request) -> bool:
    return key in given and given[key] != getattr(recorded, key)


def _from_json(name: str, value: Any) -> Any:
    """A recorded value as Request has it: a picture records one seed and one label (or null), a grid lists of them."""
    if name == "label" and value is None:
        return ()
    if name in ("label", "seed"):
        return tuple(value) if isinstance(value, list) else (value,)
    return value


def parse_seed(text: str) -> int | str | tuple[int, ...]:
    """`7`, `1,2,5-10` and `random` as an int, a tuple and "random". The values are checked by Request."""
    if text == "random" or re.fullmatch(r"[0-9]{1,20}", text):
        return text if text == "random" else int(text)
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,20})(?:-([0-9]{1,20}))?", part)
        if not match:
            raise InputError(f"seed: {shown(text)} is not {wanted(Seeds)}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_PICTURES - len(seeds):
            raise InputError(f"seed: {shown(text)}: give rising ranges and at most {MAX_PICTURES} seeds")
        seeds.extend(range(first, last + 1))
    return tuple(seeds)

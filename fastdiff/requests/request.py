"""A request: flags, or the settings of a PNG, checked by one set of rules.

Imports nothing heavy: all of this happens before torch is imported.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastdiff.checkpoints.names import WANTED_REVISION, WANTED_VARIANT, is_revision, is_variant
from fastdiff.checkpoints.registry import SCHEDULERS
from fastdiff.errors import InputError
from fastdiff.numbers import MAX_SEED, is_int, is_number
from fastdiff.requests import defaults, png

DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_PICTURES = 50_000  # of one run: as many as FID is computed on

# A flag that replaces the first drops the recorded values that only made sense with it.
_DEPENDENTS = {"model": ("revision", "variant", "horizon"), "scheduler": ("eta", "use_clipped_model_output")}


def _setting(flag: str, is_valid: Callable[[Any], bool], wants: str, default: Any = None):
    """A field of Request: its name for people, the rule for a value that is not None, and the rule in words."""
    return field(default=default, metadata={"flag": flag, "is_valid": is_valid, "wants": wants})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _is_seed(value: Any) -> bool:
    if not isinstance(value, tuple):
        return value == "random" or is_int(value, 0, MAX_SEED)
    return all(is_int(seed, 0, MAX_SEED) for seed in value) and 0 < len(value) == len(set(value)) <= MAX_PICTURES


@dataclass(frozen=True)
class Request:
    """The pictures of one run: `label` x `seed`. None leaves a choice to the model; `complete` fills it in.

    Raises InputError for a value that breaks its field's rule, whether it came from a flag or from a file.
    """

    model: str = _setting("model", _is_text, "give a bundled name, a folder or a hub id", defaults.MODEL)
    revision: str | None = _setting("revision", is_revision, WANTED_REVISION)
    variant: str | None = _setting("variant", is_variant, WANTED_VARIANT)
    scheduler: str | None = _setting("scheduler", tuple(SCHEDULERS).__contains__, f"give {' or '.join(SCHEDULERS)}")
    num_inference_steps: int | None = _setting("steps", lambda n: is_int(n, 1), "give a whole number of at least 1")
    eta: float | None = _setting("eta", lambda eta: is_number(eta, 0, 1), "give a number from 0 to 1")
    use_clipped_model_output: bool | None = _setting(
        "use_clipped_model_output", lambda flag: isinstance(flag, bool), "give true or false"
    )
    guidance_scale: float | None = _setting("cfg-scale", lambda w: is_number(w, 0), "give a number of at least 0")
    dtype: str = _setting("dtype", DTYPES.__contains__, f"give one of {', '.join(DTYPES)}", defaults.DTYPE)
    horizon: int | None = _setting("horizon", lambda n: is_int(n, 1), "give a whole number of at least 1")
    label: tuple[str | int, ...] = _setting(
        "label",
        lambda labels: isinstance(labels, tuple) and all(is_int(x, 0) or isinstance(x, str) for x in labels),
        "give a label's name or index",
        (),
    )
    seed: int | str | tuple[int, ...] = _setting(
        "seed",
        _is_seed,
        f"give one from 0 to {MAX_SEED}, a list of different ones such as 1,2,5-10, or random",
        defaults.SEED,
    )
    num_images: int | None = _setting(
        "num-images", lambda n: is_int(n, 1, MAX_PICTURES), f"give a whole number from 1 to {MAX_PICTURES}"
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, rule = getattr(self, setting.name), setting.metadata
            is_open = value is None and setting.default is None
            if not is_open and not rule["is_valid"](value):
                raise InputError(f"{rule['flag']} {shorten(value)}: {rule['wants']}")

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


def shorten(value: Any) -> str:
    """`value` as a message shows it: at most 80 characters of it."""
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


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
            raise InputError(f"seed {shorten(text)}: {_wants('seed')}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_PICTURES - len(seeds):
            raise InputError(f"seed {shorten(text)}: give rising ranges and at most {MAX_PICTURES} seeds")
        seeds.extend(range(first, last + 1))
    return tuple(seeds)


def _wants(name: str) -> str:
    return next(setting.metadata["wants"] for setting in fields(Request) if setting.name == name)

"""What is asked for: flags and the settings of a PNG, checked by one set of rules, completed by the model's defaults.

Imports nothing heavy: all of this happens before torch is imported.
"""

import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import SCHEDULERS
from fastdiff.errors import InputError
from fastdiff.requests import png

DEFAULT_MODEL = "emoji64"
DEFAULT_STEPS = 50
DEFAULT_PICTURES = 4
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_SEED = 2**32 - 1
MAX_PICTURES = 50_000  # of one run: as many as FID is computed on

# A flag that replaces the first drops the recorded values that only made sense with it.
_DEPENDENTS = {"model": ("revision", "variant"), "scheduler": ("eta", "use_clipped_model_output")}


def _setting(flag: str, is_valid: Callable[[Any], bool], wants: str, default: Any = None):
    """A field of Request: its name for people, the rule for a value that is not None, and the rule in words."""
    return field(default=default, metadata={"flag": flag, "is_valid": is_valid, "wants": wants})


def _is_int(value: Any, least: int, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any, least: float, most: float = math.inf) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _is_seed(value: Any) -> bool:
    if not isinstance(value, tuple):
        return value == "random" or _is_int(value, 0, MAX_SEED)
    return all(_is_int(seed, 0, MAX_SEED) for seed in value) and 0 < len(value) == len(set(value)) <= MAX_PICTURES


@dataclass(frozen=True)
class Request:
    """The pictures of one run: `label` x `seed`. None leaves a choice to the model; `complete` fills it in.

    Raises InputError for a value that breaks its field's rule, whether it came from a flag or from a file.
    """

    model: str = _setting("model", _is_text, "give a bundled name, a folder or a hub id", DEFAULT_MODEL)
    revision: str | None = _setting("revision", _is_text, "give a branch, tag or commit of the hub")
    variant: str | None = _setting("variant", _is_text, "give a variant of the weights such as fp16")
    scheduler: str | None = _setting("scheduler", tuple(SCHEDULERS).__contains__, f"give {' or '.join(SCHEDULERS)}")
    num_inference_steps: int | None = _setting("steps", lambda n: _is_int(n, 1), "give a whole number of at least 1")
    eta: float | None = _setting("eta", lambda eta: _is_number(eta, 0, 1), "give a number from 0 to 1")
    use_clipped_model_output: bool | None = _setting(
        "use_clipped_model_output", lambda flag: isinstance(flag, bool), "give true or false"
    )
    guidance_scale: float | None = _setting("cfg-scale", lambda w: _is_number(w, 0), "give a number of at least 0")
    dtype: str = _setting("dtype", DTYPES.__contains__, f"give one of {', '.join(DTYPES)}", "auto")
    label: tuple[str | int, ...] = _setting(
        "label",
        lambda labels: isinstance(labels, tuple) and all(_is_int(x, 0) or isinstance(x, str) for x in labels),
        "give a label's name or index",
        (),
    )
    seed: int | str | tuple[int, ...] = _setting(
        "seed", _is_seed, f"give one from 0 to {MAX_SEED}, a list of different ones such as 1,2,5-10, or random", 0
    )
    num_images: int | None = _setting(
        "num-images", lambda n: _is_int(n, 1, MAX_PICTURES), f"give a whole number from 1 to {MAX_PICTURES}"
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, rule = getattr(self, setting.name), setting.metadata
            is_open = value is None and setting.default is None
            if not is_open and not rule["is_valid"](value):
                raise InputError(f"{rule['flag']} {_shorten(value)}: {rule['wants']}")

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
        """What a PNG keeps of a completed request: everything but which pictures, and whatever is the model's own."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("label", "seed", "num_images")}


def _replaced(key: str, given: Mapping[str, Any], recorded: Request) -> bool:
    return key in given and given[key] != getattr(recorded, key)


def _shorten(value: Any) -> str:
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
            raise InputError(f"seed {_shorten(text)}: {_wants('seed')}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_PICTURES - len(seeds):
            raise InputError(f"seed {_shorten(text)}: give rising ranges and at most {MAX_PICTURES} seeds")
        seeds.extend(range(first, last + 1))
    return tuple(seeds)


def _wants(name: str) -> str:
    return next(setting.metadata["wants"] for setting in fields(Request) if setting.name == name)


Cell = tuple[int, int | None]  # the seed and the label's index of a picture


def complete(request: Request, card: ModelCard) -> tuple[Request, list[Cell]]:
    """`request` with every choice made that `card` can make and its seeds listed, and the pictures it asks for.

    They are labels x seeds, in that order. The labels of a group take turns from seed to seed.

    Flags win over the model's fastdiff.json, that over the defaults. InputError for what the model cannot do.
    """
    labels = _labels(request, card)
    info = card.info
    scheduler = request.scheduler or info.scheduler or card.scheduler
    is_ddpm = scheduler == "ddpm"
    if is_ddpm and request.eta is not None:
        raise InputError(f"eta {request.eta} is an option of ddim; leave it out, or give --scheduler ddim")
    completed = replace(
        request,
        revision=card.revision or request.revision,
        scheduler=scheduler,
        num_inference_steps=_steps(request, card),
        eta=None if is_ddpm else _first(request.eta, info.eta, 0.0),
        use_clipped_model_output=None
        if is_ddpm
        else _first(request.use_clipped_model_output, info.use_clipped_model_output, False),
        guidance_scale=_guidance_scale(request, card, labels),
        label=tuple(card.choices_name(choices) for choices in labels),
        seed=_seeds(request, max(1, len(labels))),
        num_images=None,
    )
    cells = [(seed, choices[seed % len(choices)]) for choices in labels or ((None,),) for seed in completed.seed]
    return completed, cells


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _steps(request: Request, card: ModelCard) -> int:
    most = card.num_train_timesteps
    steps = request.num_inference_steps or min(card.info.num_inference_steps or DEFAULT_STEPS, most)
    if steps > most:
        raise InputError(f"steps {steps}: {card.name} was trained with {most} steps; give a number from 1 to {most}")
    return steps


def _labels(request: Request, card: ModelCard) -> tuple[tuple[int, ...], ...]:
    """The indices of each label asked for; without any, up to four labels or groups from the first to the last."""
    if request.label and not card.config.num_class_embeds:
        raise InputError(f"label {_shorten(request.label[0])}: {card.name} has no labels; leave it out")
    every = list(card.info.label_groups) or card.labels
    count = min(DEFAULT_PICTURES, len(every))
    asked = request.label or [every[i * (len(every) - 1) // max(1, count - 1)] for i in range(count)]
    labels = tuple(card.info.label_choices(label, card.config.num_class_embeds) for label in asked)
    if len(set(labels)) < len(labels):
        raise InputError("a label is given twice; for more pictures of it give --num-images")
    return labels


def _guidance_scale(request: Request, card: ModelCard, labels: tuple[tuple[int, ...], ...]) -> float:
    can_guide = bool(labels) and card.info.null_label is not None
    if not can_guide and request.guidance_scale not in (None, 1):
        raise InputError(
            f"cfg-scale {request.guidance_scale}: {card.name} has no null label to guide with; leave it out"
        )
    return _first(request.guidance_scale, card.info.guidance_scale if can_guide else None, 1.0)


def _seeds(request: Request, num_labels: int) -> tuple[int, ...]:
    seed, count = request.seed, request.num_images
    if isinstance(seed, tuple):
        if count not in (None, len(seed)):
            raise InputError(f"num-images {count}: the list has {len(seed)} seeds; leave one of the two out")
        seeds = seed
    else:
        count = count or max(1, DEFAULT_PICTURES // num_labels)
        first = secrets.randbelow(MAX_SEED + 2 - count) if seed == "random" else seed
        if first + count - 1 > MAX_SEED:
            raise InputError(f"seed {first}: {count} pictures would pass the last seed {MAX_SEED}; give a smaller seed")
        seeds = tuple(range(first, first + count))
    if num_labels * len(seeds) > MAX_PICTURES:
        raise InputError(f"{num_labels} labels x {len(seeds)} seeds are too many; a run draws up to {MAX_PICTURES}")
    return seeds

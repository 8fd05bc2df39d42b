"""The pictures that a call asks for: a label and a seed of each."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.numbers import MAX_SEED

Label = int | str | Tensor | None  # None: the null label; a tensor: of a model that embeds labels itself


def list_pictures(
    seed: int | Sequence[int],
    num_images: int,
    class_labels: Label | Sequence[Label],
    counts: dict[str, int | None],
) -> tuple[list[Label], list[int]]:
    """Return the label and the seed of every picture.

    They are labels x seeds, in that order. Where one of the named `counts` says how many pictures there are (or
    `class_labels` is a tensor), they are that many, each with a seed and a label of its own.
    Raises InputError naming the argument.
    """
    labels = _label_list(class_labels)
    if isinstance(class_labels, Tensor):
        counts = counts | {"class_labels": len(labels)}
    known = {name: count for name, count in counts.items() if count is not None}
    if len(set(known.values())) > 1:
        raise InputError(
            f"{' and '.join(known)} speak of {' and '.join(map(str, known.values()))} pictures; choose one"
        )
    if not known:
        seeds = _seeds(seed, _count("num_images", num_images))
        return [label for label in labels for _ in seeds], seeds * len(labels)
    count = _count(*next(iter(known.items())))
    return _one_each("class_labels", labels, count), _one_each("seed", _seeds(seed, count), count)


def _label_list(class_labels: Label | Sequence[Label]) -> list[Label]:
    if isinstance(class_labels, Tensor):
        indices = class_labels.ndim <= 1 and not class_labels.is_floating_point()
        return class_labels.reshape(-1).tolist() if indices else list(class_labels)
    if isinstance(class_labels, str) or not isinstance(class_labels, Sequence):
        return [class_labels]
    return list(class_labels)


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise InputError(f"{name}: {value!r} is not a whole number of at least 1")
    return count


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """Return the seeds of a list, or `count` of them from the first on."""
    try:
        seeds = (
            [*map(operator.index, seed)]
            if isinstance(seed, Sequence)
            else [operator.index(seed) + i for i in range(count)]
        )
    except TypeError:
        raise InputError(f"seed: {seed!r} is neither a whole number nor a list of them") from None
    wrong = [each for each in seeds if not 0 <= each <= MAX_SEED]
    if wrong or not seeds:
        raise InputError(f"seed: {wrong[0] if wrong else seed} is out of range; seeds are 0 to {MAX_SEED}")
    return seeds


def _one_each(name: str, values: list, count: int) -> list:
    if len(values) == 1:
        values = values * count
    if len(values) != count:
        raise InputError(f"{name}: {len(values)} given for {count} pictures; give one, or one for each")
    return values

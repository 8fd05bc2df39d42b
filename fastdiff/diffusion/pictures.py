"""Which pictures a call asks for, and pictures out of tensors."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from fastdiff.errors import InputError, NonFiniteError
from fastdiff.numbers import MAX_SEED

Label = int | str | Tensor | None  # None: the null label; a tensor: a row of a model that embeds labels itself
OUTPUT_TYPES = ("pil", "np", "pt")


def list_pictures(
    seed: int | Sequence[int],
    num_images: int,
    class_labels: Label | Sequence[Label],
    counts: dict[str, int | None],
) -> tuple[list[Label], list[int]]:
    """The label and the seed of every picture.

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


def decode(x: Tensor, output_type: str) -> Any:
    """x_0 (N, H, W, C) in [-1, 1] -> PIL images, numpy (N, H, W, C) or torch (N, C, H, W) float32 in [0, 1].

    diffusers' DDPMPipeline and its numpy_to_pil. Raises NonFiniteError for NaN or infinity.
    """
    if not x.isfinite().all():
        raise NonFiniteError("the model's output is NaN or infinite; try --dtype float32, or check the model's weights")
    x = (x / 2 + 0.5).clamp(0, 1)
    if output_type == "pt":
        return x.permute(0, 3, 1, 2)
    array = x.cpu().numpy()
    return array if output_type == "np" else [_to_image(picture) for picture in array]


def _to_image(picture: np.ndarray) -> Image.Image:
    levels = (picture * 255).round().astype(np.uint8)
    return Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)


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
    """The seeds of a list, or `count` of them from the first on."""
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

"""The pictures that a call asks for: a subject and a seed of each, and their size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import as_int, naming, shown
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, REAL, tensor
from fastdiff.kinds import MAX_PICTURES, MAX_SEED, Pictures, Pixels
from fastdiff.schema import checked

Label = int | str | Tensor | None  # None: the null label; a tensor: of a model that embeds labels itself


@dataclass(frozen=True)
class Subjects:
    """The subjects of a call's pictures, labels or the indices of prompts, and how many pictures each has."""

    name: str  # of the argument that gives them, for messages
    each: Sequence[Any]
    count_name: str  # of the argument that says how many pictures of each
    count: int


def list_pictures(
    subjects: Subjects, seed: int | Sequence[int], counts: Mapping[str, int | None]
) -> tuple[list[Any], list[int]]:
    """Return the subject and the seed of every picture.

    They are subjects x seeds, in that order. Where one of the named `counts` says how many pictures there are, they are
    that many, each with a seed of its own, and with a subject of its own or, of subjects x count pictures, the one
    whose turn it is. Raises InputError naming the argument.
    """
    each, per_subject = list(subjects.each), _count(subjects.count_name, subjects.count)
    known = {name: _count(name, count) for name, count in counts.items() if count is not None}
    if len(set(known.values())) > 1:
        raise InputError(
            f"{' and '.join(known)} speak of {' and '.join(map(str, known.values()))} pictures; choose one"
        )
    if not known:
        seeds = _seeds(seed, per_subject)
        _count(f"{subjects.name} times seeds", len(each) * len(seeds))
        return [subject for subject in each for _ in seeds], seeds * len(each)
    (count,) = set(known.values())
    if len(each) * per_subject == count:
        each = [subject for subject in each for _ in range(per_subject)]
    return _one_each(subjects.name, each, count), _one_each("seed", _seeds(seed, count), count)


def read_labels(class_labels: Any) -> list[Any]:
    """Return the labels of a list, of a tensor with a row for each, or the one that is given. InputError for others."""
    if isinstance(class_labels, Tensor):
        tensor("class_labels", class_labels, REAL)
        indices = class_labels.ndim <= 1 and not class_labels.is_floating_point()
        return class_labels.reshape(-1).tolist() if indices else list(torch.atleast_1d(class_labels))
    if isinstance(class_labels, str | bytes) or not isinstance(class_labels, Sequence):
        return [class_labels]
    return _items("class_labels", class_labels)


def check_latents(latents: Any, config: DenoiserConfig) -> None:
    """Raise InputError unless `latents` are None or a tensor of the model's axes, (N, C, H, W) or (N, C, L).

    Their sizes are checked with the size of what is drawn.
    """
    if latents is None:
        return
    tensor("latents", latents, FLOATS)
    channels, axes = config.sample_channels, config.AXES
    if latents.ndim != 2 + len(axes) or latents.shape[1] != channels:
        raise InputError(f"latents: expected (N, {channels}, {', '.join(axes)}), got {tuple(latents.shape)}")


def check_state(x: Any, config: DenoiserConfig) -> Tensor:
    """Return what a denoiser ends with, (N, H, W, C) or (N, 1, L, C), as float32. InputError for anything else."""
    tensor("x", x, FLOATS)
    channels, sides = config.sample_channels, "1, L" if config.of_trajectories else "H, W"
    if x.ndim != 4 or x.shape[3] != channels or (config.of_trajectories and x.shape[1] != 1):
        raise InputError(f"x: expected (N, {sides}, {channels}), got {tuple(x.shape)}")
    return x.detach().float()


def picture_shape(
    config: DenoiserConfig, scale: int, height: Any, width: Any, latents: Tensor | None
) -> tuple[int, int, int]:
    """Return (C, H, W) of what a denoiser draws: that of `latents`, or for pictures of height x width pixels.

    `scale`: pixels of a picture for one of the denoiser's. Raises InputError for a size that it cannot draw.
    """
    asked = checked_side("height", height), checked_side("width", width)
    if latents is None:
        height, width = completed_size(config, *asked, scale)
        return config.in_channels, height // scale, width // scale
    sides = latents.shape[2], latents.shape[3]
    with naming("latents"):
        config.check_size(*sides)
    for name, pixels, side in zip(("height", "width"), asked, sides, strict=True):
        if pixels not in (None, side * scale):
            raise InputError(
                f"latents: they make pictures of {name} {side * scale}, and {name} is {pixels}; leave it out"
            )
    return config.in_channels, *sides


def completed_size(config: DenoiserConfig, height: int | None, width: int | None, scale: int = 1) -> tuple[int, int]:
    """Return height and width in pixels, by default the config's sample_size. InputError where it has none."""
    size = config.complete_size(height, width, scale)
    if size is None:
        raise InputError("height, width: this model's config has no sample_size; give both")
    return size


def checked_side(name: str, value: Any) -> int | None:
    """Return a height or width in pixels, None where it is left open. Raises InputError naming it."""
    return checked(name, value, Pixels | None)


def _items(name: str, values: Sequence[Any]) -> list[Any]:
    """Return the values of a list; a range of any length is no more work than a list that is too long."""
    items = list(islice(values, MAX_PICTURES + 1))
    if not 0 < len(items) <= MAX_PICTURES:
        raise InputError(f"{name}: {shown(values)} is not a list of 1 to {MAX_PICTURES}")
    return items


def _count(name: str, value: Any) -> int:
    return checked(name, value, Pictures)


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """Return the seeds of a list, or `count` of them from the first on."""
    if isinstance(seed, Sequence) and not isinstance(seed, bytes):
        seeds = [as_int(each) for each in _items("seed", seed)]
    else:
        first = as_int(seed)
        seeds = [None if first is None else first + i for i in range(count)]
    known = [each for each in seeds if each is not None]
    if len(known) < len(seeds):
        raise InputError(f"seed: {shown(seed)} is neither a whole number nor a list of them")
    wrong = [each for each in known if not 0 <= each <= MAX_SEED]
    if wrong:
        raise InputError(f"seed: {shown(wrong[0])} is out of range; seeds are 0 to {MAX_SEED}")
    return known


def _one_each(name: str, values: list, count: int) -> list:
    if len(values) == 1:
        values = values * count
    if len(values) != count:
        raise InputError(f"{name}: {len(values)} given for {count} pictures; give one, or one for each")
    return values

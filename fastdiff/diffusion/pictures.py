"""The pictures that a call asks for: the subject and seed of each picture, and their size."""

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

Label = int | str | Tensor | None  # None: the null label; a tensor: for a model that embeds labels itself


@dataclass(frozen=True)
class Subjects:
    """The subjects of a call (labels, or indices of prompts), and the number of pictures of each."""

    name: str  # the argument that gives the subjects, for messages
    each: Sequence[Any]
    count_name: str  # the argument that gives `count`, for messages
    count: int


def list_pictures(
    subjects: Subjects, seed: int | Sequence[int], counts: Mapping[str, int | None]
) -> tuple[list[Any], list[int]]:
    """Return the subject and the seed of every picture.

    Without `counts`, every subject is drawn with every seed. For example, labels cat and dog with 2 pictures each and
    seed 0 give cat 0, cat 1, dog 0, dog 1.

    If one of the named `counts` gives the number of pictures, every picture has its own seed, and there is one subject
    for each picture or one for all. If the number equals subjects x pictures per subject, each subject gets its share.
    The example with a count of 4 gives cat 0, cat 1, dog 2, dog 3.

    Raises InputError that names the argument.
    """
    each, per_subject = list(subjects.each), _count(subjects.count_name, subjects.count)
    known = {name: _count(name, count) for name, count in counts.items() if count is not None}
    if len(set(known.values())) > 1:
        raise InputError(
            f"{' and '.join(known)} are for {' and '.join(map(str, known.values()))} pictures; give equal numbers"
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
    """Return a list of labels from a list, from a tensor with one row per label, or from a single label.

    Raises InputError for other values.
    """
    if isinstance(class_labels, Tensor):
        tensor("class_labels", class_labels, REAL)
        indices = class_labels.ndim <= 1 and not class_labels.is_floating_point()
        return class_labels.reshape(-1).tolist() if indices else list(torch.atleast_1d(class_labels))
    if isinstance(class_labels, str | bytes) or not isinstance(class_labels, Sequence):
        return [class_labels]
    return _items("class_labels", class_labels)


def check_latents(latents: Any, config: DenoiserConfig) -> None:
    """Raise InputError unless `latents` are None or a tensor of the model's axes, (N, C, H, W) or (N, C, L).

    `picture_shape` and `trajectory_shape` check the sizes of the axes.
    """
    if latents is None:
        return
    tensor("latents", latents, FLOATS)
    channels, axes = config.state_channels, config.AXES
    if latents.ndim != 2 + len(axes) or latents.shape[1] != channels:
        raise InputError(f"latents: expected (N, {channels}, {', '.join(axes)}), got {tuple(latents.shape)}")


def check_state(x: Any, config: DenoiserConfig) -> Tensor:
    """Return a denoiser's final state (N, H, W, C) or (N, 1, L, C) as float32. InputError for anything else."""
    tensor("x", x, FLOATS)
    channels, sides = config.state_channels, "1, L" if config.of_trajectories else "H, W"
    if x.ndim != 4 or x.shape[3] != channels or (config.of_trajectories and x.shape[1] != 1):
        raise InputError(f"x: expected (N, {sides}, {channels}), got {tuple(x.shape)}")
    return x.detach().float()


def picture_shape(
    config: DenoiserConfig, scale: int, height: Any, width: Any, latents: Tensor | None
) -> tuple[int, int, int]:
    """Return the denoiser's (C, H, W): the shape of `latents`, or the shape for pictures of height x width pixels.

    `scale` is the number of picture pixels per denoiser pixel. Raises InputError for a size that the denoiser cannot
    draw.
    """
    asked = checked_side("height", height), checked_side("width", width)
    if latents is None:
        height, width = completed_size(config, *asked, scale)
        return config.state_channels, height // scale, width // scale
    sides = latents.shape[2], latents.shape[3]
    with naming("latents"):
        config.check_size(*sides)
    for name, pixels, side in zip(("height", "width"), asked, sides, strict=True):
        if pixels not in (None, side * scale):
            raise InputError(
                f"latents: they make pictures of {name} {side * scale}, but {name} is {pixels}; leave it out"
            )
    return config.state_channels, *sides


def completed_size(config: DenoiserConfig, height: int | None, width: int | None, scale: int = 1) -> tuple[int, int]:
    """Return height and width in pixels. They default to the config's sample_size; InputError if it has none."""
    size = config.complete_size(height, width, scale)
    if size is None:
        raise InputError("height, width: this model's config has no sample_size; give both")
    return size


def checked_side(name: str, value: Any) -> int | None:
    """Return a height or width in pixels, or None if it is not given. Raises InputError that names it."""
    return checked(name, value, Pixels | None)


def _items(name: str, values: Sequence[Any]) -> list[Any]:
    """Return the values of a list. It reads at most one value too many, so a huge range costs nothing."""
    items = list(islice(values, MAX_PICTURES + 1))
    if not 0 < len(items) <= MAX_PICTURES:
        raise InputError(f"{name}: {shown(values)} is not a list of 1 to {MAX_PICTURES} values")
    return items


def _count(name: str, value: Any) -> int:
    return checked(name, value, Pictures)


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """Return the seeds of a list, or `count` seeds that count up from one."""
    if isinstance(seed, Sequence) and not isinstance(seed, bytes):
        seeds = [as_int(each) for each in _items("seed", seed)]
    else:
        first = as_int(seed)
        seeds = [None if first is None else first + i for i in range(count)]
    known = [each for each in seeds if each is not None]
    if len(known) < len(seeds):
        raise InputError(f"seed: {shown(seed)} is neither a whole number nor a list of whole numbers")
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

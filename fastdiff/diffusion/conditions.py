"""The conditions of a run: the distinct labels or prompts of its pictures, and guidance.

A *condition* is a label, a prompt, or none. Pictures with the same label share its condition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.arguments import as_int, naming, shown
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.pictures import Label
from fastdiff.errors import InputError
from fastdiff.execution.tensors import REAL
from fastdiff.execution.transfers import upload
from fastdiff.models.blocks.conditioning import Prompt


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance, Ho and Salimans 2022 (arXiv 2207.12598)."""

    scale: float
    null_conditions: Tensor  # (N,) int64, per picture the condition that guidance leads away from
    rescale: float = 0.0  # the share rescaled to the conditional output's deviation; Lin et al. 2024, 3.4
    interval: tuple[float, float] = (0.0, 1.0)  # the part of the run with guidance; see `guides`
    most_norm: float = 0.0  # most of the guided output's norm over the conditional output's; 0: any

    def guides(self, step: int, steps: int) -> bool:
        """Whether a step is guided, as by diffusers' ClassifierFreeGuidance.

        Kynkäänniemi et al. 2024 (arXiv 2404.07724) describe guidance in an interval.
        """
        start, stop = self.interval
        return int(start * steps) <= step < int(stop * steps)


@dataclass(frozen=True)
class Conditions:
    """The distinct conditions of a run, and the condition of each picture."""

    labels: Tensor | None  # (conditions, ...), distinct; None for a model that takes no labels
    of_pictures: Tensor  # (N,) int64, the index of each picture's condition
    guidance: Guidance | None = None
    prompt: Prompt | None = None  # one entry per condition, for a model that reads a text

    def __len__(self) -> int:
        """Return the number of conditions. It is 1 for a model without labels and prompts."""
        told = self.labels if self.prompt is None else self.prompt.text
        return 1 if told is None else len(told)

    def guides(self, step: int, steps: int) -> bool:
        """Whether a step is guided."""
        return self.guidance is not None and self.guidance.guides(step, steps)


def choose_conditions(
    labels: Sequence[Label],
    seeds: Sequence[int],
    guidance_scale: float,
    config: DenoiserConfig,
    info: ModelInfo,
    device: torch.device,
) -> Conditions:
    """Return the conditions of pictures, given the label and the seed of each picture.

    Raises InputError that names `class_labels` or `guidance_scale` if the model does not support them.
    """
    if guidance_scale != 1 and (config.label_table is None):
        raise InputError(f"guidance_scale: {guidance_scale} needs a model with a null label; this one has none")
    if not config.takes_labels:
        if any(label is not None for label in labels):
            raise InputError("class_labels: this model is unconditional; leave them out")
        return Conditions(None, torch.zeros(len(labels), dtype=torch.int64, device=device))
    if config.class_embed_type is not None:
        if any(label is None or isinstance(label, str) for label in labels):
            raise InputError("class_labels: this model takes numbers, one row per picture")
        each = torch.stack([_embedded_label(label, config, device) for label in labels])
        return Conditions(each, torch.arange(len(labels), device=device))
    indices = [_label_index(label, seed, config, info) for label, seed in zip(labels, seeds, strict=True)]
    return _of_indices(indices, _checked_scale(guidance_scale, info), info.null_label, device)


def _of_indices(indices: Sequence[int], scale: float, null_label: int | None, device: torch.device) -> Conditions:
    asked = set(indices)
    null = null_label if scale != 1 and asked != {null_label} else None
    listed = sorted(asked if null is None else {*asked, null})
    of_pictures = upload([listed.index(index) for index in indices], device)
    guidance = None if null is None else Guidance(scale, torch.full_like(of_pictures, listed.index(null)))
    return Conditions(upload(listed, device), of_pictures, guidance)


def _label_index(label: Label, seed: int, config: DenoiserConfig, info: ModelInfo) -> int:
    num_labels = config.num_class_embeds or 0
    if isinstance(label, str):
        with naming("class_labels"):
            return info.label_index(label, num_labels, seed)
    if label is not None:
        index = as_int(label)
        if index is None:
            raise InputError(f"class_labels: {shown(label)} is neither a name nor a whole number")
        if not 0 <= index < num_labels:
            raise InputError(
                f"class_labels: label {shown(index)} is out of range; this model has labels 0 to {num_labels - 1}"
            )
        return index
    if info.null_label is None:
        raise InputError(f"class_labels: this model has no null label; give labels, 0 to {num_labels - 1}")
    return info.null_label


def _embedded_label(label: Label, config: DenoiserConfig, device: torch.device) -> Tensor:
    """Return a label of the config's `label_shape`, for a model that embeds labels itself."""
    try:
        found = torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(
            f"class_labels: {shown(label)} is not numeric; this model takes one row of numbers per picture"
        ) from None
    if found.shape != config.label_shape or found.dtype not in REAL:
        raise InputError(
            f"class_labels: a label has shape {tuple(found.shape)} and dtype {found.dtype}; give real numbers of "
            f"shape {config.label_shape} per picture"
        )
    return upload(found, device)


def _checked_scale(scale: float, info: ModelInfo) -> float:
    if scale != 1 and info.null_label is None:
        raise InputError(f"guidance_scale: {scale} needs a null label, and this model's fastdiff.json names none")
    return scale

"""Build our model of a live diffusers model. The two share the memory of their parameters."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.acceleration.layers import plain_parameters
from fastdiff.checkpoints.quantisation import formats, hold_in_8_bits, quantised_tensors
from fastdiff.checkpoints.weights import diffusers_keys, laid_out, split_stacked
from fastdiff.errors import InputError
from fastdiff.execution.devices import check_precision, on_meta
from fastdiff.kernels.host.weights import Quantised
from fastdiff.kinds import Precision
from fastdiff.models import live
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import DENOISERS
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.models.model import Model

KINDS: tuple[type[Model], ...] = (*DENOISERS.values(), ControlNetModel, AutoencoderKL)
FUSED = {"to_qkv", "to_kv"}  # copies that diffusers' fuse_qkv_projections makes, and unfusing does not remove


def our_class(model: Any) -> type[Model] | None:
    """Return our class for a live diffusers model that can be accelerated, or None."""
    kind = live.our_class(model)
    return kind if kind in KINDS else None


def share_parameters(model: nn.Module, precision: Precision) -> Model:
    """Return our model of diffusers' `model`. The parameters of `model` become views of ours.

    Two kinds of parameters are not shared. If our model stores a parameter in another form, the original stays where it
    is, and ours is converted again at each call. If our model stores it in 8 bits, the original keeps its shape but
    loses its memory (see `_emptied`).

    Raises InputError, before anything is changed, if the parameters do not match the model's config.
    """
    ours, shares = empty_like(model, precision)
    theirs = plain_parameters(model)
    in_8_bits = formats(ours, precision)
    state: dict[str, Tensor] = {}
    for name, keys in shares.items():
        parts = [theirs[key].data for key in keys]
        if name in in_8_bits:
            made = quantised_tensors(name, torch.cat(parts), in_8_bits[name])
            state |= {part: laid_out(tensor, torch.channels_last) for part, tensor in made.items()}
            for key in keys:
                theirs[key].data = _emptied(theirs[key].data)
            continue
        if name in ours.conversions:
            state[name] = laid_out(ours.conversions[name].convert(parts[0]), torch.channels_last)
            continue
        state[name] = laid_out(torch.cat(parts) if len(parts) > 1 else parts[0], torch.channels_last)
        for key, view in split_stacked(state[name], keys).items():
            theirs[key].data = view
    hold_in_8_bits(ours, in_8_bits)
    ours.load_state_dict(state, assign=True)
    ours.is_shared = True
    ours.sources = {name: theirs[name].data for name in ours.conversions}
    return ours.requires_grad_(False)


def empty_like(model: nn.Module, precision: Precision) -> tuple[Model, dict[str, dict[str, int]]]:
    """Return our model of diffusers' `model` without weights, and diffusers' keys for each of ours.

    Raises as `share_parameters`.
    """
    theirs = plain_parameters(model)
    if len({(tensor.dtype, tensor.device) for tensor in theirs.values()}) != 1:
        raise InputError("accelerate: the model's parameters have several dtypes or devices; move it with .to() first")
    check_precision(precision, next(iter(theirs.values())).device)
    ours = _build(model)
    shares = {name: diffusers_keys(ours, name) for name in ours.state_dict()}
    _check_keys(theirs, {key for keys in shares.values() for key in keys})
    return ours, shares


def give_back(model: nn.Module, ours: Model) -> None:
    """Fill the parameters of a live model that ours has in 8 bits with the dequantised values."""
    theirs = dict(model.named_parameters())
    for path, layer in ours.named_modules():
        if isinstance(layer, Quantised):
            keys = diffusers_keys(ours, path)
            whole = layer.dequantised(theirs[next(iter(keys))].dtype)
            for key, part in split_stacked(whole, keys).items():
                theirs[key].data = part


def _emptied(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device that is one expanded NaN. torch refuses to write to it."""
    return tensor.new_full((1,) * tensor.ndim, float("nan")).expand(tensor.shape)


def _check_keys(theirs: Collection[str], ours: Collection[str]) -> None:
    """Raise InputError if a live model's parameters are not those of its config."""
    missing = [key for key in ours if key not in theirs]
    if missing:
        raise InputError(f"accelerate: the model has no {min(missing)}; undo changes to its layers first")
    unused = [key for key in theirs if FUSED.isdisjoint(key.split(".")) and key not in ours]
    if unused:
        raise InputError(f"accelerate: the model's config has no {min(unused)}; undo changes to its layers first")


def _build(model: Any) -> Model:
    """Build our model from a live model's config, without weights. Raises InputError if we cannot run it."""
    kind = our_class(model)
    assert kind is not None
    with on_meta():
        ours = kind.from_config(model.config)
    if getattr(ours.config, "is_value_function", False):
        raise InputError(
            "accelerate: a value function is not accelerated, because planners differentiate it and fastdiff is for "
            "inference only; load it with fastdiff.UNet1DModel.from_pretrained to rate trajectories"
        )
    return ours

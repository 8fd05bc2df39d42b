"""Our model of a live diffusers model, over the memory of its parameters."""

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.checkpoints.quantisation import formats, hold_in_8_bits, quantised_tensors
from fastdiff.checkpoints.weights import diffusers_keys, laid_out, split_stacked
from fastdiff.errors import InputError
from fastdiff.execution.devices import check_precision, on_meta
from fastdiff.kernels.host.weights import Quantised
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import DENOISERS
from fastdiff.models.model import Model

KINDS: dict[str, type[Model]] = {**DENOISERS, AutoencoderKL.__name__: AutoencoderKL}
FUSED = {"to_qkv", "to_kv"}  # copies that diffusers' fuse_qkv_projections makes, and leaves when it is undone


def our_class(model: Any) -> type[Model] | None:
    """The class of ours that runs a live model of diffusers; None where there is none."""
    diffusers = sys.modules.get("diffusers")
    if diffusers is None:
        return None
    return next((kind for name, kind in KINDS.items() if isinstance(model, getattr(diffusers, name))), None)


def share_parameters(model: nn.Module, precision: Precision) -> Model:
    """Our model over the memory of diffusers' `model`, whose parameters become views of ours.

    Those that ours has in another form stay where they are, and ours is made of them anew at each call. Those that ours
    has in 8 bits keep their shapes, but no memory: see `_emptied`. Raises InputError where the parameters are not those
    of the model's config, before anything is changed.
    """
    theirs = dict(model.named_parameters())
    if len({(tensor.dtype, tensor.device) for tensor in theirs.values()}) != 1:
        raise InputError("accelerate: the model's parameters have several dtypes or devices; move it with .to() first")
    check_precision(precision, next(iter(theirs.values())).device)
    ours = _build(model)
    shares = {name: diffusers_keys(ours, name) for name in ours.state_dict()}
    _check_keys(theirs, {key for keys in shares.values() for key in keys})
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
    ours.sources = {name: theirs[name].data for name in ours.conversions}
    return ours.requires_grad_(False)


def give_back(model: nn.Module, ours: Model) -> None:
    """Give the parameters of a live model that ours has in 8 bits the values that those stand for."""
    theirs = dict(model.named_parameters())
    for path, layer in ours.named_modules():
        if isinstance(layer, Quantised):
            keys = diffusers_keys(ours, path)
            whole = layer.dequantised(theirs[next(iter(keys))].dtype)
            for key, part in split_stacked(whole, keys).items():
                theirs[key].data = part


def _emptied(tensor: Tensor) -> Tensor:
    """A tensor of the same kind whose elements are one in memory, NaN: torch refuses to write to it."""
    return tensor.new_full((1,) * tensor.ndim, float("nan")).expand(tensor.shape)


def _check_keys(theirs: Collection[str], ours: Collection[str]) -> None:
    """InputError where a live model has other parameters than its config says."""
    missing = [key for key in ours if key not in theirs]
    if missing:
        raise InputError(f"accelerate: the model has no {min(missing)}; undo changes to its layers first")
    unused = [key for key in theirs if FUSED.isdisjoint(key.split(".")) and key not in ours]
    if unused:
        raise InputError(f"accelerate: the model's config knows no {min(unused)}; undo changes to its layers first")


def _build(model: Any) -> Model:
    """Our model of a live one's config, without weights. InputError where we cannot run it."""
    kind = our_class(model)
    assert kind is not None
    with on_meta():
        ours = kind.from_config(model.config)
    if getattr(ours.config, "is_value_function", False):
        raise InputError(
            "accelerate: a value function stays diffusers', because planners differentiate it and fastdiff is for "
            "inference only; load it with fastdiff.UNet1DModel.from_pretrained to rate trajectories"
        )
    return ours

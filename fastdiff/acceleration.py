"""One line that speeds up the diffusers model or pipeline a program already has: `fastdiff.accelerate(pipe)`.

The model stays the user's object, of diffusers' class. Its parameters keep their names, shapes and values and move, one
at a time, into the memory layout of our model, which shares them. Only `forward` is ours.
"""

import sys
from typing import Any, TypeVar

import torch
from torch import nn

from fastdiff.checkpoints.weights import diffusers_keys, laid_out, split_stacked
from fastdiff.errors import InputError
from fastdiff.models.classes import DENOISERS
from fastdiff.models.denoiser import Denoiser

Accelerated = TypeVar("Accelerated")


def accelerate(model_or_pipeline: Accelerated) -> Accelerated:
    """Run a live diffusers UNet2DModel, UNet2DConditionModel, UNet1DModel or DiTTransformer2DModel on fastdiff.

    Or that of a pipeline. Attention processors of its own, LoRA layers and FreeU are refused.

    Returns the same object. The call signature, `state_dict()`, `config`, scheduler and `to()` stay what they are. For
    inference only: a sample that requires grad is an error. Raises InputError for a model of another class, or one
    that we cannot run.
    """
    model = _denoiser_of(model_or_pipeline)
    ours = share_parameters(model)
    anchor = next(name for name, _ in ours.named_parameters())
    outputs = sys.modules[type(model).forward.__module__]

    def forward(*args, **kwargs) -> Any:
        nonlocal ours
        if model.get_parameter(anchor).data_ptr() != ours.get_parameter(anchor).data_ptr():  # moved by to()
            ours = share_parameters(model)
        output = ours(*args, **kwargs)
        if not hasattr(output, "sample"):  # a plain tuple was asked for
            return output
        return getattr(outputs, type(output).__name__)(output.sample)

    model.forward = forward
    return model_or_pipeline


def restore(model_or_pipeline: Accelerated) -> Accelerated:
    """Undo `accelerate`: diffusers' own forward again, over the same parameters. Returns the same object."""
    model = _denoiser_of(model_or_pipeline)
    if "forward" not in vars(model):
        raise InputError("restore: this model is not accelerated")
    del model.forward
    return model_or_pipeline


def share_parameters(model: nn.Module) -> Denoiser:
    """Our model over the memory of diffusers' `model`, whose parameters become views of ours.

    Those that ours has in another form stay where they are, and ours is made of them anew at each call.
    """
    theirs = dict(model.named_parameters())
    if len({(tensor.dtype, tensor.device) for tensor in theirs.values()}) != 1:
        raise InputError("accelerate: the model's parameters have several dtypes or devices; move it with .to() first")
    _check_changes(model)
    config: Any = model.config
    with torch.device("meta"):
        ours = _our_class(model).from_config(config)
    if ours.config.is_value_function:
        raise InputError(
            "accelerate: a value function stays diffusers', because planners differentiate it and fastdiff is for "
            "inference only; load it with fastdiff.UNet1DModel.from_pretrained to rate trajectories"
        )
    state = {}
    for name in ours.state_dict():
        keys = diffusers_keys(ours, name)
        missing = [key for key in keys if key not in theirs]
        if missing:
            raise InputError(f"accelerate: the model has no {missing[0]}; undo changes to its layers first")
        parts = [theirs[key].data for key in keys]
        if name in ours.conversions:
            state[name] = laid_out(ours.conversions[name].convert(parts[0]), torch.channels_last)
            continue
        state[name] = laid_out(torch.cat(parts) if len(parts) > 1 else parts[0], torch.channels_last)
        for key, view in split_stacked(state[name], keys).items():
            theirs[key].data = view
    ours.load_state_dict(state, assign=True)
    ours.sources = {name: theirs[name].data for name in ours.conversions}
    return ours.requires_grad_(False)


def _check_changes(model: Any) -> None:
    """InputError where attention or blocks of a text U-Net do not do what its config says."""
    if type(model).__name__ != "UNet2DConditionModel":
        return
    kinds = {type(processor).__name__ for processor in model.attn_processors.values()}
    changed = sorted(kinds - {"AttnProcessor", "AttnProcessor2_0"})
    if changed:
        raise InputError(
            f"accelerate: {', '.join(changed)} is not supported; call set_default_attn_processor() on the U-Net first"
        )
    if any(getattr(block, "s1", None) is not None for block in model.up_blocks):
        raise InputError("accelerate: FreeU is not supported; call disable_freeu() on the U-Net first")


def _denoiser_of(model_or_pipeline: Any) -> nn.Module:
    parts = (getattr(model_or_pipeline, kind.part.name, None) for kind in DENOISERS.values())
    model = next((part for part in parts if part is not None), model_or_pipeline)
    _our_class(model)
    return model


def _our_class(model: Any) -> type[Denoiser]:
    """The class that runs a model of diffusers. InputError where there is none."""
    diffusers = sys.modules.get("diffusers")
    for name, kind in DENOISERS.items():
        if diffusers and isinstance(model, getattr(diffusers, name)):
            return kind
    raise InputError(
        f"model_or_pipeline: {type(model).__name__} cannot be accelerated; give diffusers' {' or '.join(DENOISERS)}, "
        "or its pipeline"
    )

"""One line that speeds up the diffusers model or pipeline a program already has: `fastdiff.accelerate(pipe)`.

The model stays the user's object, of diffusers' class. Its parameters keep their names, shapes and values and move, one
at a time, into the memory layout of our model, which shares them. Only `forward` is ours.
"""

import sys
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastdiff.errors import InputError
from fastdiff.models.unet import UNet2DModel
from fastdiff.weights import diffusers_keys

Accelerated = TypeVar("Accelerated")


def accelerate(model_or_pipeline: Accelerated) -> Accelerated:
    """Run a live diffusers UNet2DModel, or that of a pipeline, on fastdiff; returns the same object.

    The call signature, `state_dict()`, `config`, scheduler and `to()` stay what they are. For inference only: a sample
    that requires grad is an error. Raises InputError for a model of another class, or one that we cannot run.
    """
    model = _unet_of(model_or_pipeline)
    ours = share_parameters(model)
    output_class = sys.modules[type(model).forward.__module__].UNet2DOutput

    def forward(
        sample: Tensor, timestep: Tensor | float, class_labels: Tensor | None = None, return_dict: bool = True
    ) -> Any:
        nonlocal ours
        if model.conv_in.weight.data_ptr() != ours.conv_in.weight.data_ptr():  # moved by to()
            ours = share_parameters(model)
        prediction = ours(sample, timestep, class_labels).sample
        return output_class(prediction) if return_dict else (prediction,)

    model.forward = forward
    return model_or_pipeline


def restore(model_or_pipeline: Accelerated) -> Accelerated:
    """Undo `accelerate`: diffusers' own forward again, over the same parameters. Returns the same object."""
    model = _unet_of(model_or_pipeline)
    if "forward" not in vars(model):
        raise InputError("restore: this model is not accelerated")
    del model.forward
    return model_or_pipeline


def share_parameters(model: nn.Module) -> UNet2DModel:
    """Our model over the memory of diffusers' `model`, whose parameters become views of ours."""
    theirs = dict(model.named_parameters())
    if len({(tensor.dtype, tensor.device) for tensor in theirs.values()}) != 1:
        raise InputError("accelerate: the model's parameters have several dtypes or devices; move it with .to() first")
    with torch.device("meta"):
        ours = UNet2DModel.from_config(model.config)
    state = {}
    for name in ours.state_dict():
        keys = diffusers_keys(ours, name)
        missing = [key for key in keys if key not in theirs]
        if missing:
            raise InputError(f"accelerate: the model has no {missing[0]}; undo changes to its layers first")
        parts = [theirs[key].data for key in keys]
        layout = torch.channels_last if parts[0].ndim == 4 else torch.contiguous_format
        state[name] = (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous(memory_format=layout)
        for key, view in zip(keys, state[name].chunk(len(keys)), strict=True):
            theirs[key].data = view
    ours.load_state_dict(state, assign=True)
    return ours.requires_grad_(False)


def _unet_of(model_or_pipeline: Any) -> nn.Module:
    model = getattr(model_or_pipeline, "unet", model_or_pipeline)
    diffusers = sys.modules.get("diffusers")
    if diffusers is None or not isinstance(model, diffusers.UNet2DModel):
        raise InputError(f"{type(model).__name__} cannot be accelerated; give diffusers' UNet2DModel or its pipeline")
    return model

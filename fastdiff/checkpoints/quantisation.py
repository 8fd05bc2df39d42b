"""Weights in 8 bits: which weights of a model are quantised, and how the model holds them.

int8 and fp8 quantise the weights of linear layers and convolutions, except

- the first and last layers, and the layers that embed time, class and added conditions: each model's `whole`;
- 1x1 shortcuts, which are computed as part of another convolution;
- weights whose form differs from diffusers': each model's `conversions`.

Norms, biases, tables and all accumulations keep their dtype. With int8, activations keep theirs too. With fp8, the
activations that quantised layers read are rounded to e4m3, with one factor per token (linear layers) or per picture
(convolutions).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastdiff.kernels.host.weights import NAMES, Quantised, quantise
from fastdiff.kinds import Precision

SHORTCUT = "conv_shortcut"
FORMATS = {name: dtype for dtype, name in NAMES.items()}  # precision -> dtype of its weights


@dataclass(frozen=True)
class Origin:
    """Where the weights of a model in 8 bits came from."""

    read: Callable[[], dict[str, Tensor]]  # returns the weights of the files again, by diffusers' keys
    device: torch.device  # where they were quantised: a GPU may round the factors in another way than a CPU


def formats(model: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """Return the parameters that a model of this precision holds in 8 bits: name to dtype."""
    return dict.fromkeys(names_in_8_bits(model), FORMATS[precision]) if precision in FORMATS else {}


def names_in_8_bits(model: nn.Module) -> list[str]:
    """Return the names of the parameters that int8 and fp8 quantise."""
    conversions, whole = getattr(model, "conversions", {}), getattr(model, "whole", ())
    names = [
        f"{path}.weight"
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) and not path.endswith(SHORTCUT)
    ]
    return [name for name in names if not name.startswith(whole) and name not in conversions]


def hold_in_8_bits(model: nn.Module, formats: Mapping[str, torch.dtype]) -> None:
    """Replace these parameters of a model by empty `Quantised` ones. `quantised_tensors` makes their values."""
    for name, dtype in formats.items():
        layer = model.get_submodule(name.rpartition(".")[0])
        weight = layer.weight
        assert isinstance(weight, Tensor)
        values = torch.empty_like(weight, dtype=dtype)
        del layer.weight
        layer.weight = Quantised(values, torch.empty(len(weight), dtype=torch.float32, device=weight.device))


def quantised_tensors(name: str, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Quantise a weight. Return the parameters that it becomes, by name."""
    return {f"{name}.{part}": tensor.data for part, tensor in quantise(weight, dtype).named_parameters()}

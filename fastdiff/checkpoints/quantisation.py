"""Weights in 8 bits: which of a model's they are, and how it holds them.

The rule, of int8 and of fp8: the weights of linear layers and convolutions, but
- the first and the last layers, and those that embed time, class and what is added to them: each model's `whole`;
- 1x1 shortcuts, which are part of the sum of another convolution;
- those that our models hold in another form than diffusers', their `conversions`.
Norms, biases and tables stay as they are, and so do all sums. The activations that such layers read stay too in int8;
in fp8 they are rounded to e4m3, each token of a linear layer and each picture of a convolution by a factor of its own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fastdiff.kernels.host.weights import NAMES, Quantised, quantise
from fastdiff.kinds import Precision

SHORTCUT = "conv_shortcut"
FORMATS = {name: dtype for dtype, name in NAMES.items()}  # of weights in 8 bits, by the precision


def formats(model: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """The parameters that a model of this precision holds in 8 bits, by name."""
    return dict.fromkeys(names_in_8_bits(model), FORMATS[precision]) if precision in FORMATS else {}


def names_in_8_bits(model: nn.Module) -> list[str]:
    """The names of the parameters that the rule above is for."""
    conversions, whole = getattr(model, "conversions", {}), getattr(model, "whole", ())
    names = [
        f"{path}.weight"
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) and not path.endswith(SHORTCUT)
    ]
    return [name for name in names if not name.startswith(whole) and name not in conversions]


def hold_in_8_bits(model: nn.Module, formats: Mapping[str, torch.dtype]) -> None:
    """Make these parameters of a model `Quantised`, without values: `quantised_tensors` makes those, by their names."""
    for name, dtype in formats.items():
        layer = model.get_submodule(name.rpartition(".")[0])
        weight = layer.weight
        assert isinstance(weight, Tensor)
        values = torch.empty_like(weight, dtype=dtype)
        del layer.weight
        layer.weight = Quantised(values, torch.empty(len(weight), dtype=torch.float32, device=weight.device))


def quantised_tensors(name: str, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters, by name, that a weight of this name becomes."""
    return {f"{name}.{part}": tensor.data for part, tensor in quantise(weight, dtype).named_parameters()}

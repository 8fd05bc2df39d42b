"""Weights in 8 bits: which of a model's they are, and how it holds them.

The rule: the weights of linear layers and convolutions, but
- the first and the last layers, and those that embed time, class and what is added to them: each model's `whole`;
- 1x1 shortcuts, which are part of the sum of another convolution;
- those that our models hold in another form than diffusers', their `conversions`.
Norms, biases and tables stay as they are, and so do all activations and sums.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fastdiff.kernels.host.weights import Quantised, quantise

SHORTCUT = "conv_shortcut"


def names_in_8_bits(model: nn.Module) -> list[str]:
    """The names of the parameters that the rule above is for."""
    conversions, whole = getattr(model, "conversions", {}), getattr(model, "whole", ())
    names = [
        f"{path}.weight"
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) and not path.endswith(SHORTCUT)
    ]
    return [name for name in names if not name.startswith(whole) and name not in conversions]


def hold_in_8_bits(model: nn.Module, names: Iterable[str]) -> None:
    """Make these parameters of a model `Quantised`, without values: `quantised_tensors` makes those, by their names."""
    for name in names:
        layer = model.get_submodule(name.rpartition(".")[0])
        weight = layer.weight
        assert isinstance(weight, Tensor)
        values = torch.empty_like(weight, dtype=torch.int8)
        del layer.weight
        layer.weight = Quantised(values, torch.empty(len(weight), dtype=torch.float32, device=weight.device))


def quantised_tensors(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The parameters, by name, that a weight of this name becomes."""
    return {f"{name}.{part}": tensor.data for part, tensor in quantise(weight).named_parameters()}

"""The weights that peft's layers compute with: W + scaling B A of LoRA, and what DoRA, LoHa and LoKr add.

peft computes each part of a layer on its own, at each call. The sum here is one weight, with the same result.
"""

from typing import Any

import torch
from torch import Tensor

from fastdiff.acceleration.layers import is_adapted
from fastdiff.errors import InputError

KINDS = {f"peft.tuners.{kind}.layer" for kind in ("lora", "loha", "lokr")}
LAYERS = {"Linear", "Conv1d", "Conv2d"}
VARIANTS = {"DoraLinearVariant", "DoraConv1dVariant", "DoraConv2dVariant"}
UNDO = "call unload_lora_weights() on the pipeline first, or delete_adapters() on the model"


def check_adapter(name: str, layer: Any) -> None:
    """Raise InputError for a layer of peft whose weight is not a sum that `merged` knows."""
    kind = type(layer)
    if kind.__module__ not in KINDS or kind.__name__ not in LAYERS:
        raise InputError(
            f"accelerate: {name} is a {kind.__name__} of {kind.__module__}, not of LoRA, LoHa or LoKr; {UNDO}"
        )
    base = layer.base_layer
    if is_adapted(base) or getattr(base, "groups", 1) != 1:
        raise InputError(f"accelerate: adapters of two kinds, or of grouped channels, on {name}; {UNDO}")
    for variant in getattr(layer, "lora_variant", {}).values():
        if type(variant).__name__ not in VARIANTS:
            raise InputError(f"accelerate: {name} has a {type(variant).__name__}, which is not supported; {UNDO}")
    if base.bias is None and any(getattr(layer, "lora_bias", {}).values()):
        raise InputError(f"accelerate: lora_bias on {name}, which has no bias; {UNDO}")


def merged(layer: Any, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias that a layer of peft computes with.

    They are in float32, or float64 if the base layer is; without active adapters, they are the base layer's own.

    Args:
        layer: see `check_adapter`.
        scale: multiplies the scaling of each adapter, as `scale` in diffusers' `cross_attention_kwargs`.
    """
    base = layer.base_layer
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # as its forward does
    weight, bias = base.weight, base.bias
    if layer.disable_adapters or layer.merged:
        return weight, bias
    dtype = torch.promote_types(weight.dtype, torch.float32)
    for adapter in layer.active_adapters:
        if adapter in getattr(layer, "lora_A", ()):
            update, factor = _product(layer, adapter, dtype), layer.scaling[adapter] * scale
        elif adapter in getattr(layer, "_available_adapters", ()):
            update, factor = layer.get_delta_weight(adapter).to(dtype), scale  # scaled by peft
        else:
            continue
        weight = weight.to(dtype) + factor * update
        if adapter in getattr(layer, "lora_variant", {}):
            norms = torch.linalg.vector_norm((base.weight.to(dtype) + factor * update).flatten(1), dim=1)
            lengths = layer.lora_magnitude_vector[adapter].weight.to(dtype).flatten() / norms
            weight = weight * lengths.view(-1, *[1] * (weight.ndim - 1))
            bias = bias if bias is None else base.bias.to(dtype) + lengths * (bias.to(dtype) - base.bias.to(dtype))
        elif getattr(layer, "lora_bias", {}).get(adapter):
            bias = bias.to(dtype) + factor * layer.lora_B[adapter].bias.to(dtype)
    return weight, bias


def _product(layer: Any, adapter: str, dtype: torch.dtype) -> Tensor:
    """Return B A in the shape of the weight: (C_out, C_in), or (C_out, C_in, K, K) of a convolution."""
    up, down = (part[adapter].weight.to(dtype).flatten(1) for part in (layer.lora_B, layer.lora_A))
    return (up @ down).view(layer.base_layer.weight.shape)

"""A live model's modules and parameters by the names that they have without adapters.

peft puts a layer of its own around a layer of the model, as its `base_layer`. The functions here look through it.
diffusers adds the layers of IP-Adapters to a U-Net. The functions here leave them out.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

IP_PROCESSORS = {"IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0"}  # of cross-attentions
IP_PROJECTION = "MultiIPAdapterImageProjection"  # the U-Net's encoder_hid_proj


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return a model's modules by name, with base layers instead of the layers of peft around them."""
    return ((path, module) for path, _, module in _walk(model, "", set()))


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name. The parameters of adapters are not among them."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, module in plain_modules(model)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of peft in a model, by the names of their base layers."""
    return {path: outer for path, outer, module in _walk(model, "", set()) if outer is not module}


def plain_name(name: str) -> str:
    """Return the name that a parameter has without adapters."""
    return name.replace(".base_layer.", ".")


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer of peft around another layer."""
    return library(type(module)) == "peft" and hasattr(module, "base_layer")


def is_of_ip_adapter(module: nn.Module) -> bool:
    """Whether a module is a part of IP-Adapters that diffusers has added to a U-Net."""
    kind = type(module)
    return kind.__name__ in {*IP_PROCESSORS, IP_PROJECTION} and library(kind) == "diffusers"


def library(kind: type) -> str:
    """Return the name of the package that defines a class."""
    return kind.__module__.partition(".")[0]


def _walk(outer: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the name of each module, the module, and what is inside if it is a layer of peft."""
    module: Any = outer
    while is_adapted(module):
        module = module.base_layer
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, outer, module
    for name, child in module._modules.items():
        if child is not None and not is_of_ip_adapter(child):
            yield from _walk(child, f"{path}.{name}" if path else name, seen)

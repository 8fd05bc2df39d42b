"""Find changes to live diffusers models that our models would ignore, and refuse each with an error that names it.

`check_changes` looks at every module. `Watch` is a cheap check at each call of whether to look again.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn

from fastdiff.acceleration.adapters import check_adapter
from fastdiff.acceleration.ip_adapters import check_ip_adapters
from fastdiff.acceleration.layers import IP_PROCESSORS, adapted_layers, library, plain_modules, plain_parameters
from fastdiff.errors import InputError
from fastdiff.kinds import Precision
from fastdiff.requests.defaults import PRECISION

# Plain attention, as the config says
PLAIN_PROCESSORS = {
    *("AttnProcessor", "AttnProcessor2_0", "AttnAddedKVProcessor", "AttnAddedKVProcessor2_0"),
    "ZSingleStreamAttnProcessor",
}
KNOWN_PROCESSORS = PLAIN_PROCESSORS | IP_PROCESSORS  # `check_ip_adapters` says which IP-Adapters are known
LIBRARIES = {"torch", "diffusers"}  # layers of other libraries are refused


class Watch:
    """Notices changes to a model's modules, weight memory, attention processors, FreeU and diffusers hooks.

    The constructor collects everything to compare, so that a check is fast: 30 us for the U-Net of Stable Diffusion 1.5
    and 100 us for the U-Net of SDXL, which has 1930 modules (torch 2.13, one core of an AMD EPYC).
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._children = [module._modules.values() for module in modules if module._modules]
        self._weights: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.ndim > 1  # a bias moves together with its layer's weight
        ]
        self._attentions = [vars(module) for module in modules if hasattr(module, "processor")]
        self._places = [vars(module) for module in (model, *model.children(), *_up_blocks(model))]
        self._modules, self._state = self._current_modules(), self._current_state()

    def sees_a_change(self) -> bool:
        """Whether the model has changed since the watch was made."""
        return self._current_modules() != self._modules or self._current_state() != self._state

    def _current_modules(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(self._children))

    def _current_state(self) -> tuple[list[Any], ...]:
        pointers = [parameters[name].data_ptr() for parameters, name in self._weights]
        processors = [attributes.get("processor") for attributes in self._attentions]
        free_u = [attributes.get("s1") for attributes in self._places]
        hooks = [len(_hooks_of_diffusers(attributes)) for attributes in self._places]
        return pointers, processors, free_u, hooks


def check_changes(model: nn.Module, precision: Precision) -> None:
    """Raise InputError if a live model does not do what its config says. The message says how to undo the change.

    Adapters of peft are merged into our model, unless it is in 8 bits. Our U-Net reads IP-Adapters.
    """
    _check_adapters(model, precision)
    check_ip_adapters(model)
    _check_attention(model)
    if any(getattr(block, "s1", None) is not None for block in _up_blocks(model)):
        raise InputError("accelerate: FreeU is not supported; call disable_freeu() on the pipeline first")
    if _hooks_of_diffusers(vars(model)):
        raise InputError("accelerate: hooks of diffusers on the model would not run; remove them first")
    for name, module in plain_modules(model):
        if name:
            _check_layer(name, module)
    for name, parameter in plain_parameters(model).items():
        if type(parameter) is not nn.Parameter:
            kind = type(parameter).__name__
            raise InputError(f"accelerate: {name} is a {kind}; use a model that is not quantised")


def _check_adapters(model: Any, precision: Precision) -> None:
    layers = adapted_layers(model)
    if layers and precision != PRECISION:
        raise InputError(
            f"accelerate: LoRA layers are not supported in {precision} unless they are fused; "
            "call fuse_lora() and unload_lora_weights() on the pipeline first"
        )
    for name, layer in layers.items():
        check_adapter(name, layer)


def _check_attention(model: nn.Module) -> None:
    changed = sorted(kind.__name__ for kind in _processors(model) if not _is_known(kind))
    if changed:
        fused = all(name.startswith("Fused") for name in changed)
        undo = "unfuse_qkv_projections()" if fused else "set_attn_processor(AttnProcessor2_0())"
        raise InputError(f"accelerate: {', '.join(changed)} is not supported; call {undo} on the model first")


def _check_layer(name: str, module: nn.Module) -> None:
    """Raise InputError if a module inside the model has an unknown class, a replaced forward, or hooks."""
    kind, forward = type(module), vars(module).get("forward")
    if hasattr(module, "_hf_hook"):
        raise InputError(
            f"accelerate: offload of single layers ({name}) is not supported; call remove_all_hooks() on the pipeline "
            "first, and enable_model_cpu_offload() if memory is short"
        )
    if _hooks_of_diffusers(vars(module)) or module._forward_hooks or module._forward_pre_hooks:
        raise InputError(f"accelerate: hooks on {name} would not run; remove them first")
    if library(kind) not in LIBRARIES:
        place = library(kind)
        raise InputError(f"accelerate: {name} is a {kind.__name__} of {place}; restore diffusers' own layer first")
    if forward is not None and getattr(forward, "__self__", None) is not module:
        raise InputError(f"accelerate: the forward of {name} was replaced; undo that first")


def _is_known(processor: type) -> bool:
    return processor.__name__ in KNOWN_PROCESSORS and library(processor) == "diffusers"


def _processors(model: nn.Module) -> set[type]:
    """Return the classes of a model's attention processors."""
    return {type(module.processor) for module in model.modules() if hasattr(module, "processor")}


def _up_blocks(model: Any) -> Iterator[nn.Module]:
    """Return the blocks that FreeU changes."""
    return iter(getattr(model, "up_blocks", ()))


def _hooks_of_diffusers(attributes: dict[str, Any]) -> Any:
    """Return the hooks in diffusers' own registry, by name: group offload, layerwise casting, caches."""
    return getattr(attributes.get("_diffusers_hook"), "hooks", ())

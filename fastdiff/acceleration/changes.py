"""Changes that programs make to live models of diffusers: those that we would pass over are refused by name.

`check_changes` looks at every module. `Watch` tells between calls, cheaply, whether there is a reason to look again.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn

from fastdiff.errors import InputError

PLAIN_PROCESSORS = {"AttnProcessor", "AttnProcessor2_0"}  # which do what the config says, and no more
LIBRARIES = {"torch", "diffusers"}  # whose layers we know


class Watch:
    """Notices that a model is no longer as it was: other modules, weights elsewhere, processors, FreeU or hooks.

    SDXL's U-Net has 1930 modules: what is asked at each call is gathered once, as dictionaries and weights.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self._children = [module._modules.values() for module in modules if module._modules]
        self._weights: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.ndim > 1  # vectors move with the weights beside them
        ]
        self._attentions = [vars(module) for module in modules if hasattr(module, "processor")]
        self._places = [vars(module) for module in (model, *model.children(), *_up_blocks(model))]
        self._modules, self._state = self._current_modules(), self._current_state()

    def sees_a_change(self) -> bool:
        """Whether something is not as it was when this was made."""
        return self._current_modules() != self._modules or self._current_state() != self._state

    def _current_modules(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(self._children))

    def _current_state(self) -> tuple[list[Any], ...]:
        pointers = [parameters[name].data_ptr() for parameters, name in self._weights]
        processors = [attributes.get("processor") for attributes in self._attentions]
        free_u = [attributes.get("s1") for attributes in self._places]
        hooks = [len(_hooks_of_diffusers(attributes)) for attributes in self._places]
        return pointers, processors, free_u, hooks


def check_changes(model: nn.Module) -> None:
    """InputError where a live model does not do what its config says, with the way to undo that."""
    _check_adapters(model)
    _check_attention(model)
    if any(getattr(block, "s1", None) is not None for block in _up_blocks(model)):
        raise InputError("accelerate: FreeU is not supported; call disable_freeu() on the pipeline first")
    for name, module in model.named_modules():
        _check_hooks(name, module)
        _check_layer(name, module)


def _check_adapters(model: Any) -> None:
    if getattr(model, "peft_config", None):
        raise InputError(
            "accelerate: LoRA layers are not supported unless they are fused; "
            "call fuse_lora() and unload_lora_weights() on the pipeline first"
        )
    projection = type(getattr(model, "encoder_hid_proj", None)).__name__
    if projection.endswith("ImageProjection") or any("IPAdapter" in name for name in _processors(model)):
        raise InputError("accelerate: IP-Adapter is not supported; call unload_ip_adapter() on the pipeline first")


def _check_attention(model: nn.Module) -> None:
    changed = sorted(_processors(model) - PLAIN_PROCESSORS)
    if changed:
        fused = all(name.startswith("Fused") for name in changed)
        undo = "unfuse_qkv_projections()" if fused else "set_attn_processor(AttnProcessor2_0())"
        raise InputError(f"accelerate: {', '.join(changed)} is not supported; call {undo} on the model first")


def _check_hooks(name: str, module: nn.Module) -> None:
    if not name:  # the model itself, where accelerate's hooks stay around what is ours
        problem = _hooks_of_diffusers(vars(module))
    elif hasattr(module, "_hf_hook"):
        raise InputError(
            f"accelerate: offload of single layers ({name}) is not supported; call remove_all_hooks() on the pipeline "
            "first, and enable_model_cpu_offload() if memory is short"
        )
    else:
        problem = [*_hooks_of_diffusers(vars(module)), *module._forward_hooks, *module._forward_pre_hooks]
    if problem:
        raise InputError(f"accelerate: hooks on {name or 'the model'} would not run; remove them first")


def _check_layer(name: str, module: nn.Module) -> None:
    kind = type(module)
    if kind.__module__.partition(".")[0] not in LIBRARIES and name:
        raise InputError(
            f"accelerate: {name} is a {kind.__name__}, which diffusers does not make; put its own layer back"
        )
    if name and getattr(vars(module).get("forward"), "__self__", module) is not module:
        raise InputError(f"accelerate: {name} has another forward than its class; undo that first")
    for parameter in module._parameters.values():
        if parameter is not None and type(parameter) is not nn.Parameter:
            raise InputError(
                f"accelerate: {name} has weights of type {type(parameter).__name__}; use a model that is not quantised"
            )


def _processors(model: nn.Module) -> set[str]:
    """The class names of a model's attention processors."""
    return {type(module.processor).__name__ for module in model.modules() if hasattr(module, "processor")}


def _up_blocks(model: Any) -> Iterator[nn.Module]:
    """The blocks that FreeU marks."""
    return iter(getattr(model, "up_blocks", ()))


def _hooks_of_diffusers(attributes: dict[str, Any]) -> Any:
    """The hooks in diffusers' own registry, by name: group offload, layerwise casting, caches."""
    return getattr(attributes.get("_diffusers_hook"), "hooks", ())

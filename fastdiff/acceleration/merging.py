"""Keep the adapters of a live model merged into the weights of our model.

peft's layers add their products to the layer that they wrap, at each call. Our model has no such layers. Its weights
are the merged ones: computed in float32, rounded once, and written into the memory that kernels and CUDA graphs read.
So an adapter, its weight or its values may change, and our model stays.

The parameters of a wrapped layer keep the plain values, in memory of their own. Without adapters, the layer shares the
memory of our model again.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.acceleration.adapters import merged
from fastdiff.acceleration.contents import fingerprint
from fastdiff.acceleration.layers import adapted_layers, plain_modules, plain_parameters
from fastdiff.checkpoints.weights import diffusers_keys, split_stacked
from fastdiff.errors import InputError
from fastdiff.models.model import Model

State = tuple[Any, ...]


class Merging:
    """The adapters of a live model, and what of them is merged into our model."""

    def __init__(self, model: nn.Module, ours: Model):
        """ours: a model that shares the memory of all parameters of `model`; see `sharing.share_parameters`."""
        self._model = model
        self._views = _views(ours)
        self._modules = [module for _, module in plain_modules(model)]
        self._memory = {name: _memory(parameter) for name, parameter in plain_parameters(model).items()}
        self._apart: dict[str, nn.Module] = {}  # layers with memory of their own, by name
        self._layers: list[_Layer] = []
        self._states: list[State | None] = []  # of each layer when it was merged
        self._counted: list[tuple[dict[str, Any], str]] = []  # where the tensors are whose writes torch counts
        self._state: tuple[list[Any], ...] = ()
        self._scale = 1.0
        self._contents: list[int] | None = None  # of all layers when they were merged; None if that is not known
        self.follow()

    @property
    def has_adapters(self) -> bool:
        return bool(self._layers)

    def fits(self) -> bool:
        """Whether our model has all layers and parameters of the live one, adapters aside."""
        if [module for _, module in plain_modules(self._model)] != self._modules:
            return False
        parameters, own = plain_parameters(self._model), self._apart.keys() | adapted_layers(self._model).keys()
        if parameters.keys() != self._memory.keys():
            return False
        for name, parameter in parameters.items():
            (address, *form), (our_address, *our_form) = _memory(parameter), self._memory[name]
            if form != our_form or (address != our_address and name.rpartition(".")[0] not in own):
                return False
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def follow(self) -> None:
        """Find the adapters again, after they were added or removed. Raises InputError before anything is changed."""
        found = adapted_layers(self._model)
        for path in found:
            if f"{path}.weight" not in self._views:
                raise InputError(f"accelerate: adapters on {path} are not supported; call unload_lora_weights() first")
        for path, base in [*self._apart.items()]:
            if path not in found:
                for parameter, view in self._shared(path, base):
                    parameter.data = view.copy_(parameter.data)
                del self._apart[path]
        self._layers = [_Layer(layer, self._shared(path, layer.base_layer)) for path, layer in found.items()]
        for path, layer in found.items():
            for parameter, view in self._shared(path, layer.base_layer):
                if parameter.data_ptr() == view.data_ptr():
                    parameter.data = parameter.data.clone()
            self._apart[path] = layer.base_layer
        self._states, self._contents = [None] * len(self._layers), None
        places = (place for layer in self._layers for place in layer.places)
        self._counted = [(given, name) for given, name in places if given[name] is not None and _counts(given[name])]

    def has_changed(self, scale: float) -> bool:
        """Whether torch counts a change to an adapter, or another scale is wanted. For new layers see `Watch`."""
        return scale != self._scale or self._current_state() != self._state

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, scale: float, contents: bool) -> bool:
        """Merge what has changed, and return whether anything has.

        Args:
            scale: multiplies the scaling of each adapter.
            contents: whether to look for writes that torch does not count, which waits for the GPU.
        """
        found = fingerprint(tensor for layer in self._layers for tensor in layer.tensors()) if contents else None
        is_known = scale == self._scale and (found is None or found == self._contents)
        changed = [
            i
            for i, (layer, state) in enumerate(zip(self._layers, self._states, strict=True))
            if not is_known or layer.state() != state
        ]
        for i in changed:
            self._layers[i].merge(scale)
            self._states[i] = self._layers[i].state()
        self._scale, self._state = scale, self._current_state()
        if contents or changed:
            self._contents = found
        return bool(changed)

    def _current_state(self) -> tuple[list[Any], ...]:
        """Return what changes with settings, and with values if torch counts it. `Watch` sees memory that moves."""
        return [layer.settings() for layer in self._layers], [given[name]._version for given, name in self._counted]

    def _shared(self, path: str, base: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Return a layer's parameters, weight first, with our memory of each."""
        parameters = ((name, base._parameters.get(name)) for name in ("weight", "bias"))
        return [(each, self._views[f"{path}.{name}"]) for name, each in parameters if each is not None]


class _Layer:
    """A layer of peft."""

    def __init__(self, layer: Any, shared: list[tuple[nn.Parameter, Tensor]]):
        self._layer, self._views = layer, [view for _, view in shared]
        self._attributes = vars(layer)
        self.places = [(module._parameters, name) for module in layer.modules() for name in module._parameters]

    def merge(self, scale: float) -> None:
        for view, tensor in zip(self._views, merged(self._layer, scale), strict=False):
            assert tensor is not None
            view.copy_(tensor)

    def state(self) -> State:
        """Return what changes with the layer's settings, and with its tensors as far as torch counts it."""
        return self.settings(), [_writes(parameters.get(name)) for parameters, name in self.places]

    def settings(self) -> State:
        attributes = self._attributes
        active = attributes["_active_adapter"]
        scaling = [each if type(each) is float else _comparable(each) for each in attributes["scaling"].values()]
        active = active if type(active) is str else (*active,)
        return attributes["_disable_adapters"], active, (*attributes["merged_adapters"],), scaling

    def tensors(self) -> list[Tensor]:
        tensors = (parameters.get(name) for parameters, name in self.places)
        scaling = self._attributes["scaling"].values()
        return [each for each in (*tensors, *scaling) if isinstance(each, Tensor) and each.numel()]


def _comparable(value: Any) -> Any:
    """Return a setting of peft. After `enable_lora_hotswap`, a scaling is a tensor."""
    return _writes(value) if isinstance(value, Tensor) else value


def _writes(tensor: Tensor | None) -> tuple[int, int] | None:
    """Return a tensor's address, and how often it was written to if torch counts that."""
    return None if tensor is None else (tensor.data_ptr(), tensor._version if _counts(tensor) else 0)


def _counts(tensor: Tensor) -> bool:
    """Whether torch counts the writes to a tensor."""
    return not tensor.is_inference()


def _memory(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return a parameter's address and, after it, its form."""
    return parameter.data_ptr(), parameter.shape, parameter.dtype, parameter.device


def _views(ours: Model) -> dict[str, Tensor]:
    """Return our memory of each of diffusers' parameters that we keep in the same form."""
    return {
        key: view
        for name, tensor in ours.state_dict().items()
        if name not in ours.conversions
        for key, view in split_stacked(tensor, diffusers_keys(ours, name)).items()
    }

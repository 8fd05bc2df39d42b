"""CUDA graphs of a function of tensors: captured on the second call for its shapes, replayed after that.

A replay is one launch where the function was hundreds. The same kernels run in the same order: the bits are the same.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.host.recording import recorder

# Tensors, or tuples and named tuples of such: a value of several tensors is one argument.
Tensors = Tensor | tuple[Any, ...]
Function = Callable[..., Tensors]

# Graphs kept of a function, the least recently used goes first: each holds the memory of its intermediate results. The
# number is chosen, not measured: steps with noise and without it, at four sizes of a batch.
CAPACITY = 8


def map_tensors(function: Callable[..., Any], *trees: Tensors) -> Any:
    """Return `function` of each tensor, or of the tensors at one place of several trees, in the shape of the first."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    parts = [map_tensors(function, *each) for each in zip(*trees, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def _describe(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


class _Graph:
    """One captured call, with inputs and outputs in memory of its own."""

    def __init__(self, function: Function, inputs: Tensors):
        # what the function would lay out anew at each replay, the copy into these does
        self.inputs = map_tensors(lambda tensor: tensor.clone(memory_format=torch.contiguous_format), inputs)
        self.graph = torch.cuda.CUDAGraph()
        self.idle = torch.cuda.Event()
        torch.cuda.current_stream().synchronize()
        stream = torch.cuda.Stream()  # torch's own for captures is on the device of the process's first
        capturing = torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local")
        # A capture that fails may leave its stream the current one.
        with torch.cuda.stream(torch.cuda.current_stream()), capturing:
            self.outputs = function(*self.inputs)

    def replay(self, inputs: Tensors) -> Any:
        torch.cuda.current_stream().wait_event(self.idle)  # another stream may still read the outputs
        map_tensors(Tensor.copy_, self.inputs, inputs)
        self.graph.replay()
        outputs = map_tensors(torch.clone, self.outputs)  # a later call must not change them
        self.idle.record()
        return outputs


class Graphed:
    """`function` of tensors, a pure launch of kernels, called through a CUDA graph once its shapes came twice.

    Its arguments and its result are Tensors. Calls from several threads and streams take turns. It must be thrown away
    when the memory behind the function moves.
    """

    def __init__(self, function: Function):
        self._function = function
        self._graphs: OrderedDict[tuple, _Graph | None] = OrderedDict()  # None: the shapes came once
        self._lock = threading.Lock()

    def __call__(self, x: Tensor, *others: Tensors) -> Any:
        inputs = (x, *others)
        if recorder() is not None:  # which a replay tells nothing
            return self._function(*inputs)
        key = map_tensors(_describe, inputs)
        with self._lock, torch.cuda.device(x.device):
            if key not in self._graphs:  # the first call compiles the kernels, which no capture may do
                with only_compiling():
                    self._function(*inputs)
                outputs = self._function(*inputs)
                self._remember(key, None)
                return outputs
            graph = self._graphs[key]
            if graph is None:
                graph = _Graph(self._function, inputs)
                self._remember(key, graph)
            self._graphs.move_to_end(key)
            return graph.replay(inputs)

    def _remember(self, key: tuple, graph: _Graph | None) -> None:
        self._graphs[key] = graph
        while len(self._graphs) > CAPACITY:
            self._graphs.popitem(last=False)

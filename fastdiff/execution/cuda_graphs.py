"""CUDA graphs of a function of tensors: captured on the second call for its shapes, replayed after that.

A replay is one launch where the function was hundreds. The same kernels run in the same order: the bits are the same.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.host.recording import recorder

Outputs = tuple[Tensor, ...]

CAPACITY = 8  # graphs kept, the least recently used goes first: each holds the memory of its intermediate results


class _Graph:
    """One captured call, with inputs and outputs in memory of its own."""

    def __init__(self, function: Callable[..., Outputs], inputs: tuple[Tensor, ...]):
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self.graph = torch.cuda.CUDAGraph()
        self.idle = torch.cuda.Event()
        torch.cuda.current_stream().synchronize()
        stream = torch.cuda.Stream()  # torch's own for captures is on the device of the process's first
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.outputs = function(*self.inputs)

    def replay(self, inputs: tuple[Tensor, ...]) -> Outputs:
        torch.cuda.current_stream().wait_event(self.idle)  # another stream may still read the outputs
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        outputs = tuple(output.clone() for output in self.outputs)  # a later call must not change them
        self.idle.record()
        return outputs


class Graphed:
    """`function` of tensors, a pure launch of kernels, called through a CUDA graph once its shapes came twice.

    Calls from several threads and streams take turns. It must be thrown away when the memory behind the function moves.
    """

    def __init__(self, function: Callable[..., Outputs]):
        self._function = function
        self._graphs: OrderedDict[tuple, _Graph | None] = OrderedDict()  # None: the shapes came once
        self._lock = threading.Lock()

    def __call__(self, *inputs: Tensor) -> Outputs:
        if recorder() is not None:  # which a replay tells nothing
            return self._function(*inputs)
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs)
        with self._lock, torch.cuda.device(inputs[0].device):
            if key not in self._graphs:  # the first call compiles the kernels, which no capture may do
                self._remember(key, None)
                with only_compiling():
                    self._function(*inputs)
                return self._function(*inputs)
            if self._graphs[key] is None:
                self._remember(key, _Graph(self._function, inputs))
            self._graphs.move_to_end(key)
            return self._graphs[key].replay(inputs)

    def _remember(self, key: tuple, graph: _Graph | None) -> None:
        self._graphs[key] = graph
        while len(self._graphs) > CAPACITY:
            self._graphs.popitem(last=False)

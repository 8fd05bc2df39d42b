"""CUDA graphs of a function of tensors: captured on the second call with the same shapes, then replayed.

A replay is one launch instead of hundreds. It runs the same kernels in the same order, so the bits are the same.
"""

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastdiff.execution.replaying.trees import Fixed, Function, Tensors, chosen, map_tensors, plain
from fastdiff.kernels.host.arrivals import new_counters, with_counters
from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.host.recording import recorder

# Graphs per function, unless its model keeps more; the least recently used is dropped. Each holds the memory of its
# intermediate results. The number is chosen, not measured.
CAPACITY = 8

_capture = threading.Lock()  # held by the thread that captures


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let Python collect no garbage: a capture fails if its thread destroys the graph of a model that is gone."""
    with _capture:  # the switch is the whole process's
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def _describe(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


class _Graph:
    """One captured call, with its own input and output memory."""

    def __init__(self, function: Function, inputs: tuple[Tensors | Fixed, ...]):
        # contiguous, so that the copy into these makes the layout change that each replay would make otherwise
        self.inputs = map_tensors(lambda each: each.clone(memory_format=torch.contiguous_format), plain(inputs))
        self.held = [_reference(each) for each in inputs]  # to what was copied last, if it is fixed
        self.graph = torch.cuda.CUDAGraph()
        self.counters = new_counters(self.inputs[0].device)
        self.idle = torch.cuda.Event()
        torch.cuda.current_stream().synchronize()
        stream = torch.cuda.Stream()  # torch's default capture stream is on the device of the process's first capture
        capturing = torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local")
        # A failed capture may leave its stream as the current stream.
        counting = with_counters(self.counters)
        with without_garbage_collection(), torch.cuda.stream(torch.cuda.current_stream()), capturing, counting:
            self.outputs = function(*self.inputs)

    def replay(self, inputs: tuple[Tensors | Fixed, ...], wanted: Container[int] | None) -> Any:
        torch.cuda.current_stream().wait_event(self.idle)  # another stream may still read the outputs
        for i, (own, given, tensors) in enumerate(zip(self.inputs, inputs, plain(inputs), strict=True)):
            held = self.held[i]
            if held is None or held() is not given:
                map_tensors(Tensor.copy_, own, tensors)
                self.held[i] = _reference(given)
        self.graph.replay()
        outputs = map_tensors(torch.clone, chosen(self.outputs, wanted))  # a later call must not change them
        self.idle.record()
        return outputs


def _reference(given: Tensors | Fixed) -> weakref.ref[Fixed] | None:
    return weakref.ref(given) if isinstance(given, Fixed) else None


class Graphed:
    """Call `function` through a CUDA graph, from the second call with the same shapes on.

    The function may only launch kernels. Its arguments and its result are `Tensors`. Calls from several threads and
    streams take turns. Discard this object when memory that the function uses, such as weights, moves.
    """

    def __init__(self, function: Function):
        self.most = CAPACITY  # graphs that are kept
        self._function = function
        self._graphs: OrderedDict[tuple, _Graph | None] = OrderedDict()  # None: called once, not captured yet
        self._lock = threading.Lock()

    def __call__(self, x: Tensor, *others: Tensors | Fixed, wanted: Container[int] | None = None) -> Any:
        """Return the function's result, or of a tuple only the items at the indices in `wanted`."""
        inputs = (x, *others)
        tensors = plain(inputs)
        if recorder() is not None:  # a replay would report no calls to it
            return chosen(self._function(*tensors), wanted)
        key = map_tensors(_describe, tensors)
        with self._lock, torch.cuda.device(x.device):
            if key not in self._graphs:  # the first call compiles the kernels, which a capture must not do
                with only_compiling():
                    self._function(*tensors)
                outputs = self._function(*tensors)
                self._remember(key, None)
                return chosen(outputs, wanted)
            graph = self._graphs[key]
            if graph is None:
                graph = _Graph(self._function, inputs)
                self._remember(key, graph)
            self._graphs.move_to_end(key)
            return graph.replay(inputs, wanted)

    def _remember(self, key: tuple, graph: _Graph | None) -> None:
        self._graphs[key] = graph
        while len(self._graphs) > self.most:
            self._graphs.popitem(last=False)

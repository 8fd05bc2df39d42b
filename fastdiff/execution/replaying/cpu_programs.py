"""CPU programs of a function of tensors: traced on the second call with the same shapes, then replayed.

A replay runs the same torch functions in the same order, without the Python code between them, and with weights that
are packed once. So the bits are the same. It is on a CPU what a CUDA graph is on a GPU. When weights change, the next
replay packs them again, and no others.
"""

import threading
from collections import OrderedDict
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from fastdiff.execution.replaying.cpu_trace import MOST_PACKED, NoProgram, Program, trace
from fastdiff.execution.replaying.cuda_graphs import CAPACITY
from fastdiff.execution.replaying.trees import Fixed, Function, Tensors, chosen, map_tensors, plain
from fastdiff.kernels.host.recording import recorder


class Programmed:
    """Call `function` through a program, from the second call with the same shapes on.

    A function that reads numbers outside of leaves, or changes its arguments or weights, has no program: it is called
    each time. The arguments and the result are `Tensors`. Threads may call it at the same time. Discard this object
    when memory that the function uses, such as weights, moves.
    """

    def __init__(self, function: Function, *, packs: bool = True):
        """packs: whether weights are packed. Set it to False if they may change unseen, through other tensors."""
        self._function, self._packs = function, packs
        self._programs: OrderedDict[tuple, Program | None] = OrderedDict()  # None: called once, or has no program
        self._refused: set[tuple] = set()
        self._lock = threading.Lock()

    def __call__(self, *inputs: Tensors | Fixed, wanted: Container[int] | None = None) -> Any:
        """Return the function's result, or of a tuple only the items at the indices in `wanted`."""
        tensors = map_tensors(_contiguous, plain(inputs))
        if recorder() is not None:  # a replay would report no calls to it
            return chosen(self._function(*tensors), wanted)
        program = self._program(tensors)
        return chosen(self._function(*tensors) if program is None else program(tensors), wanted)

    def _program(self, tensors: tuple[Tensors, ...]) -> Program | None:
        """Return the program for these tensors, or None if this is the first call with their shapes."""
        key = (torch.get_num_threads(), map_tensors(_describe, tensors))  # weights are packed for a number of threads
        with self._lock:
            program, is_first = self._programs.get(key), key not in self._programs
            if program is not None:
                program.repack()
            elif not is_first and key not in self._refused:
                try:
                    program = trace(self._function, tensors, MOST_PACKED if self._packs else 0)
                except NoProgram:
                    self._refused.add(key)
            self._programs[key] = program
            self._programs.move_to_end(key)
            if len(self._programs) > CAPACITY:
                self._programs.popitem(last=False)
            return program


def _contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor with memory from its start on. Steps read views of an input by their place in its memory."""
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _describe(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype

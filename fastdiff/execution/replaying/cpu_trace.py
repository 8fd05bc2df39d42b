"""Trace a function of CPU tensors to a program: the list of the torch functions that it calls."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fastdiff.execution.replaying.trees import Function, Tensors, map_tensors
from fastdiff.kernels.host.leaves import Leaf, recording_leaves

MOST_PACKED = 2**29  # bytes of packed weights in a program, which are a second copy; chosen, not measured


class NoProgram(Exception):
    """A replay cannot repeat what the function does."""


class Place(int):
    """The index of a tensor in the memory of a run."""


class Step(NamedTuple):
    """A call of a torch function or of a leaf."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    reads: tuple[tuple[int, Place], ...]  # arguments that are a tensor of the run, by index
    lists: tuple[tuple[int, list[Any]], ...]  # arguments that are a list of tensors, some of them of the run
    options: dict[str, Any]
    writes: tuple[Place, ...]  # where its results go
    last: tuple[Place, ...] = ()  # the places that no later step reads


class Packing:
    """How the weight of a step is packed."""

    def __init__(self, leaf: Leaf, args: tuple[Any, ...]):
        """Remember a leaf and its arguments. The second one is the weight. Keep the form of the other tensors."""
        self._pack = leaf.pack
        self._args = tuple(_form(each) if isinstance(each, Tensor) and i != 1 else each for i, each in enumerate(args))
        self._packed_writes = -1

    @property
    def is_current(self) -> bool:
        """Whether nothing has been written to the weight since it was packed."""
        return self._packed_writes == self._args[1]._version

    def packed(self) -> Tensor:
        """Return the weight as it is now, packed."""
        assert self._pack is not None
        self._packed_writes = self._args[1]._version  # before it is read, so that a write meanwhile counts later
        return self._pack(*self._args)[1]


class Program:
    """The steps of a traced function. Several threads may run it at the same time."""

    def __init__(
        self, steps: list[Step], inputs: int, outputs: Tensors, places: list[Place], packings: dict[int, Packing]
    ):
        """Make a program of steps.

        Args:
            inputs: how many tensors are in the first places.
            outputs: a tree of the shape of the function's result; its tensors are not read.
            places: of its result's tensors.
            packings: of the steps that hold packed weights, by index.
        """
        self._steps, self._inputs, self._outputs, self._results = (
            _with_last_reads(steps, places),
            inputs,
            outputs,
            places,
        )
        self._size = 1 + max((max(step.writes) for step in steps if step.writes), default=inputs)
        self._packings = packings

    def repack(self) -> None:
        """Pack the weights that have changed again. Only one thread may call this at a time.

        Threads that run the program meanwhile go on with the weights that they began with.
        """
        changed = {i: packing for i, packing in self._packings.items() if not packing.is_current}
        if changed:
            steps = list(self._steps)
            with torch.inference_mode(False), torch.no_grad():
                for i, packing in changed.items():
                    steps[i] = steps[i]._replace(args=_with_weight(steps[i].args, packing.packed()))
            self._steps = steps

    def __call__(self, inputs: tuple[Tensors, ...]) -> Any:
        """Return the function's result for contiguous inputs of the traced shapes and dtypes."""
        memory: list[Any] = [*_flat(inputs), *[None] * (self._size - self._inputs)]
        for function, args, reads, lists, options, writes, last in self._steps:
            filled = list(args)
            for i, place in reads:
                filled[i] = memory[place]
            for i, items in lists:
                filled[i] = [memory[each] if type(each) is Place else each for each in items]
            result = function(*filled, **options)
            if len(writes) == 1:
                memory[writes[0]] = result
            elif writes:
                for place, tensor in zip(writes, result, strict=True):
                    memory[place] = tensor
            for place in last:
                memory[place] = None
        results = iter([memory[place] for place in self._results])
        return map_tensors(lambda _: next(results), self._outputs)


def trace(function: Function, inputs: tuple[Tensors, ...], room: int) -> Program:
    """Return the program of `function` for inputs like these. Raises NoProgram.

    room: the most bytes of weights that it packs.
    """
    with torch.inference_mode(False), torch.no_grad():
        inputs = map_tensors(torch.clone, inputs)  # each with memory of its own
        tracer = _Tracer(_flat(inputs), room)
        with recording_leaves(tracer.record_leaf), tracer:
            outputs = function(*inputs)
        found = [tracer.place(each) for each in _flat(outputs)]
        places = [place for place in found if isinstance(place, Place)]
        if len(places) < len(found):
            raise NoProgram("a result is a weight")
        shape = map_tensors(lambda each: torch.empty(0), outputs)
    return Program(tracer.steps, len(list(_flat(inputs))), shape, places, tracer.packings)


class _Tracer(TorchDispatchMode):
    """Record the torch functions that run, except views: a step that reads a view takes it from the whole tensor."""

    def __init__(self, inputs: Iterator[Tensor], room: int):
        super().__init__()
        self.steps: list[Step] = []
        self.packings: dict[int, Packing] = {}  # of the steps that hold packed weights, by index
        self._room = room
        self._count = 0
        self._storages: dict[int, StorageWeakRef] = {}  # by address, which a reference keeps from being used again
        self._places: dict[int, dict[tuple, Place]] = {}  # of the views of a storage, by their geometry
        for tensor in inputs:
            self._new(tensor)
        self._given = set(self._storages)

    def place(self, tensor: Tensor) -> Tensor | Place:
        """Return the place of a tensor of the run; other tensors are weights and stay as they are."""
        views = None if tensor.is_mkldnn else self._places.get(_address(tensor))  # a packed weight has no storage
        if views is None:
            return tensor
        geometry = _geometry(tensor)
        if geometry not in views:
            *layout, dtype = geometry
            whole = next(iter(views.items()))
            if dtype != whole[0][-1]:
                raise NoProgram("a view has another dtype")
            views[geometry] = self._next()
            step = Step(torch.as_strided, (None, *layout), ((0, whole[1]),), (), {}, (views[geometry],))
            self.steps.append(step)
        return views[geometry]

    def record_leaf(self, leaf: Leaf, args: tuple[Any, ...]) -> Tensor:
        with recording_leaves(None), _disable_current_modes():
            packing = self._packing(leaf, args)
            packed = args if packing is None else _with_weight(args, packing.packed())
            result = leaf(*args)
        self._record(leaf.__wrapped__, packed, {}, result)
        if packing is not None:
            self.packings[len(self.steps) - 1] = packing
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch's compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        sources = {_address(each) for each in _tensors((*args, *kwargs.values()))}
        made = {_address(each) for each in _tensors((result,))}
        if func._schema.is_mutable:
            self._check_changes(func, args, kwargs)
            self._record(func, args, kwargs, ())
        elif not made:
            raise NoProgram(f"{func} reads numbers")
        elif not made <= sources:  # otherwise it is a view
            self._record(func, args, kwargs, result)
        return result

    def _record(self, function: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Record a step. `result` is a tensor, or a tuple of tensors and other objects."""
        given = tuple(name for name, value in options.items() if isinstance(value, Tensor))
        if given:
            args, function = (*args, *(options[name] for name in given)), _taking(function, given)
            options = {name: value for name, value in options.items() if name not in given}
        places = [self.place(each) if isinstance(each, Tensor) else each for each in args]
        reads = tuple((i, each) for i, each in enumerate(places) if type(each) is Place)
        lists = tuple(
            (i, [self.place(item) if isinstance(item, Tensor) else item for item in each])
            for i, each in enumerate(args)
            if isinstance(each, list | tuple) and next(_tensors(each), None) is not None
        )
        constants = tuple(None if type(each) is Place else each for each in places)
        results = (result,) if isinstance(result, Tensor) else result
        if len(results) == 1 and results is result:
            raise NoProgram(f"{function} returns a tuple of one")
        writes = tuple(self._new(each) if isinstance(each, Tensor) else self._next() for each in results)
        self.steps.append(Step(function, constants, reads, lists, options, writes))

    def _new(self, tensor: Tensor) -> Place:
        """Give a place to a tensor with new memory, or to one more result with the memory of another."""
        place, address = self._next(), _address(tensor)
        self._storages.setdefault(address, StorageWeakRef(tensor.untyped_storage()))
        self._places.setdefault(address, {}).setdefault(_geometry(tensor), place)
        return place

    def _next(self) -> Place:
        self._count += 1
        return Place(self._count - 1)

    def _check_changes(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Raise NoProgram if a function changes a tensor that is not of the run: an input, or a weight."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = options.get(argument.name, args[i] if i < len(args) else None)
                for tensor in _tensors((value,)):
                    if _address(tensor) not in self._storages or _address(tensor) in self._given:
                        raise NoProgram(f"{func} changes an input or a weight")

    def _packing(self, leaf: Leaf, args: tuple[Any, ...]) -> Packing | None:
        """Return how the leaf's weight is packed; None if that is not possible, or needs too much memory."""
        weight = args[1] if leaf.pack is not None else None
        if weight is None or _address(weight) in self._storages or weight.is_inference() or weight.nbytes > self._room:
            return None  # a weight of the run is another one at each call
        self._room -= weight.nbytes
        return Packing(leaf, args)


def _with_last_reads(steps: list[Step], results: list[Place]) -> list[Step]:
    """Return the steps, each with the places that nothing reads after it."""
    kept, done = set(results), []
    for step in reversed(steps):
        nested = (item for _, items in step.lists for item in items if type(item) is Place)
        used = {*(place for _, place in step.reads), *nested, *step.writes} - kept
        kept |= used
        done.append(step._replace(last=tuple(used)))
    return done[::-1]


def _with_weight(args: tuple[Any, ...], weight: Tensor) -> tuple[Any, ...]:
    """Return the arguments of a leaf that packs, with another weight."""
    return (args[0], weight, *args[2:])


def _form(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form without memory."""
    return torch.empty_like(tensor, device="meta")


def _taking(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return `function` with the last arguments by position instead of by name."""

    def call(*args: Any, **options: Any) -> Any:
        return function(*args[: -len(names)], **dict(zip(names, args[-len(names) :], strict=True)), **options)

    return call


def _flat(tree: Tensors) -> Iterator[Tensor]:
    """Yield the tensors of a tree in the order of `map_tensors`."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for each in tree:
            yield from _flat(each)


def _tensors(args: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in the lists among them."""
    for each in args:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype

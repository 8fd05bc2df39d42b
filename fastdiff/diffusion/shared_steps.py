"""Steps that several runs share: each row of a batch is at its own step of its own run.

A run that finds a `Share` in its context hands its steps to it instead of taking them. The share may take steps of
several runs together, if their `key` is equal. A picture has the same bits alone and in any company, so sharing changes
no picture.
"""

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastdiff.execution.replaying.trees import Fixed, map_tensors

ROWS = 1024  # a graph's table has a multiple of it, so that runs of any usual number of steps share a graph
REMEMBERED = 4  # companies whose joined constants are kept; the least recent goes


class Constants(NamedTuple):
    """The inputs of a step that are the same at each step of a run."""

    rows: Tensor  # float32: the schedule's, with zeros up to a multiple of ROWS; see `denoise_step`
    guidance_scale: Tensor  # (N,) float32
    text: tuple[Tensor, ...]  # `Conditioning.text`, with an entry for each picture of each half
    inputs: tuple[Tensor, ...]  # of an inpainting model, (k, H, W, C'), with an entry for each picture of each half
    control: tuple[Any, ...]  # `Controlled.inputs`


class GraphCall(NamedTuple):
    """A graph of a step and its inputs: (n, ...), or (halves * n, ...) with an entry for each picture of each half."""

    run: Callable[..., tuple[Tensor, ...]]
    x_t: Tensor
    step: Tensor  # (n,) int32
    time: tuple[Tensor, Tensor]
    earlier: Tensor | Fixed
    constants: Fixed  # Constants
    noise: Tensor | Fixed
    wanted: tuple[int, ...]
    seeds: Fixed
    zeros: Fixed  # like `earlier`


class StepTaker(Protocol):
    """The steps of a run: a `Loop` of `diffusion.loop`."""

    @property
    def denoiser(self) -> Any:
        """The model."""

    @property
    def halves(self) -> int:
        """2 if the step is guided, otherwise 1."""

    def key(self, x_t: Tensor, earlier: Tensor | None) -> tuple[Any, ...]:
        """Return what steps that are taken together have in common."""

    def step_alone(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Take a step."""

    def graph_call(self, *args: Any, **kwargs: Any) -> GraphCall:
        """Return the graph of a step and its inputs."""


@dataclass(frozen=True, eq=False)
class AskedStep:
    """A step that a run wants to take: the arguments of its `step_alone`."""

    loop: StepTaker
    x_t: Tensor  # (N, H, W, C) float32
    i: int
    noise: Tensor | None
    part: slice
    earlier: Tensor | None
    weights: Hashable  # the state of the model's weights that the step is for

    @property
    def changed(self) -> bool:
        """Whether the model has other weights now."""
        return bool(self.loop.denoiser.weights_state != self.weights)

    @property
    def pictures(self) -> int:
        """The number of pictures."""
        return len(range(*self.part.indices(len(self.x_t))))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """See `Loop.key`."""
        return (*self.loop.key(self.x_t, self.earlier), self.weights)

    def alone(self) -> tuple[Tensor, ...]:
        """Take the step; return x_{t-1} and x0, and the next step's `earlier` if there is one."""
        return self.loop.step_alone(*self.arguments)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `step_alone` and `graph_call`."""
        return self.x_t, self.i, self.noise, self.part, *(() if self.earlier is None else (self.earlier,))


Share = Callable[[AskedStep], tuple[Tensor, ...]]
sharing: ContextVar[Share | None] = ContextVar("sharing", default=None)
waited: ContextVar[float] = ContextVar("waited", default=0.0)  # seconds that a run has waited for other runs


class _Joined(NamedTuple):
    """The inputs of a company's graph that stay the same from step to step."""

    constants: Fixed
    seeds: Fixed
    zeros: Fixed  # like `earlier`
    loops: tuple[Any, ...]  # keeps them alive, so that no other loop has their ids


class Company:
    """Takes steps of several runs as one CUDA graph, and remembers what stays the same from step to step."""

    def __init__(self) -> None:
        self._joined: dict[tuple[Any, ...], _Joined] = {}

    def take(self, asked: Sequence[AskedStep], size: int) -> list[tuple[Tensor, ...]]:
        """Return the result of each step. All have the same key.

        Args:
            size: the rows of the graph, at least the number of pictures. Further rows repeat the last picture.
        """
        on_cpu = asked[0].loop.denoiser.device.type == "cpu"  # computes each picture on its own anyway
        return [each.alone() for each in asked] if len(asked) == 1 or on_cpu else self.as_graph(asked, size)

    def as_graph(self, asked: Sequence[AskedStep], size: int) -> list[tuple[Tensor, ...]]:
        """Take the steps together on any device."""
        calls = [each.loop.graph_call(*each.arguments) for each in asked]
        first, halves = calls[0], asked[0].loop.halves
        rows = partial(_join, size=size, halves=1)
        same = self._constants(asked, calls, size, halves)
        time = map_tensors(lambda *parts: _join(parts, size=size, halves=halves), *(call.time for call in calls))
        step = rows([call.step for call in calls])
        earlier = same.zeros if asked[0].earlier is None else rows([call.earlier for call in calls])
        noise = same.seeds if isinstance(first.noise, Fixed) else rows([call.noise for call in calls])
        x_t = rows([call.x_t for call in calls])
        made = first.run(x_t, step, time, earlier, same.constants, noise, wanted=first.wanted)
        counts = [each.pictures for each in asked]
        return list(zip(*(tensor[: sum(counts)].split(counts) for tensor in made), strict=True))

    def _constants(self, asked: Sequence[AskedStep], calls: Sequence[GraphCall], size: int, halves: int) -> _Joined:
        key = (size, *((id(each.loop), each.part.start, each.part.stop) for each in asked))
        if key not in self._joined:
            while len(self._joined) >= REMEMBERED:
                del self._joined[next(iter(self._joined))]
            self._joined[key] = _joined_constants(tuple(each.loop for each in asked), calls, size, halves)
        self._joined[key] = self._joined.pop(key)  # the most recent
        return self._joined[key]


def _joined_constants(loops: tuple[StepTaker, ...], calls: Sequence[GraphCall], size: int, halves: int) -> _Joined:
    rows, each_half = partial(_join, size=size, halves=1), partial(_join, size=size, halves=halves)
    parts = [cast(Constants, call.constants.tensors) for call in calls]
    tables = [part.rows.expand(len(call.step), -1, -1) for part, call in zip(parts, calls, strict=True)]
    constants = parts[0]._replace(
        rows=rows(tables),
        guidance_scale=rows([part.guidance_scale for part in parts]),
        text=map_tensors(lambda *each: each_half(each), *(part.text for part in parts)),
        inputs=map_tensors(lambda *each: each_half(each), *(part.inputs for part in parts)),
    )
    fixed = zip(*((call.seeds, call.zeros) for call in calls), strict=True)
    seeds, zeros = (Fixed(rows([each.tensors for each in parts_of])) for parts_of in fixed)
    return _Joined(Fixed(constants), seeds, zeros, loops)


def _join(parts: Sequence[Any], *, size: int, halves: int) -> Tensor:
    """Join tensors (halves * n, ...) to one of (halves * size, ...): each half has all pictures, and the last again."""
    whole = torch.cat([part.unflatten(0, (halves, -1)) for part in parts], dim=1)
    missing = size - whole.shape[1]
    if missing:
        whole = torch.cat([whole, whole[:, -1:].expand(-1, missing, *whole.shape[2:])], dim=1)
    return whole.flatten(0, 1)

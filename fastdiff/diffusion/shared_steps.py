"""Work that several runs share: steps, in which each row of a batch is at its own step of its own run, and decoding.

A run that finds a `Share` in its context hands its work to it instead of doing it. The share may do the work of several
runs together, if their `key` is equal. A picture has the same bits alone and in any company, so sharing changes no
picture.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fastdiff.execution.replaying.trees import Fixed, map_tensors

ROWS = 1024  # a graph's table has a multiple of it, so that runs of any usual number of steps share a graph
AHEAD = 8  # steps whose moments are joined at a time
REMEMBERED = 4  # batches; the least recent goes
GoesOn = Callable[[], bool]


class Constants(NamedTuple):
    """The inputs of a step that are the same at each step of a run."""

    rows: Tensor  # float32: the schedule's, with zeros up to a multiple of ROWS; see `denoise_step`
    guidance_scale: Tensor  # (N,) float32
    text: tuple[Tensor, ...]  # `Conditioning.text`, with an entry for each picture of each half
    inputs: tuple[Tensor, ...]  # of an inpainting model, (k, H, W, C'), with an entry for each picture of each half
    control: tuple[Any, ...]  # `Controlled.inputs`


class Moments(NamedTuple):
    """Holds what steps read of their time, for some consecutive steps. They may be views of tables."""

    step: Tensor  # (n, steps) int32
    temb: Tensor  # (halves * n, steps, width)
    timesteps: Tensor  # (halves * n, steps) float32


class FixedInputs(NamedTuple):
    """Holds the inputs of a graph that stay the same from step to step."""

    constants: Fixed  # Constants
    seeds: Fixed  # (n,) int64
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

    @property
    def draws_outside(self) -> bool:
        """Whether a generator draws the noise of some step."""

    def drawn(self, x_t: Tensor, noise: Tensor | None, part: slice) -> Tensor:
        """Return a step's noise from a generator, for a part of the pictures."""

    def fixed(self, part: slice, x_t: Tensor) -> FixedInputs:
        """Return the inputs of the graph that stay the same."""

    def moments(self, i: int, part: slice, most: int) -> Moments:
        """Return the moments of at most `most` steps from step i on."""

    def graph(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return the graph of a step."""


class Asked(Protocol):
    """Work that a run wants to be done."""

    @property
    def key(self) -> Hashable:
        """Return what work that is done together has in common."""

    @property
    def pictures(self) -> int:
        """The number of pictures."""

    @property
    def device(self) -> torch.device:
        """Where the work is done."""

    @property
    def changed(self) -> bool:
        """Whether the model has other weights now."""

    def alone(self) -> "Taken":
        """Do the work, or its first step."""


class Taken(NamedTuple):
    """Work that was done."""

    result: Any
    more: Asked | None = None  # what follows, if the run asked for more at once
    steps: int = 1


class Share(Protocol):
    """Does work for several runs. All code of these runs takes turns."""

    @property
    def each_step(self) -> bool:
        """Whether the caller of the run looks at each step."""

    def ask(self, asked: Asked) -> Any:
        """Wait for the result of the work."""

    def outside(self) -> AbstractContextManager[None]:
        """Give the turn back during the block."""


sharing: ContextVar[Share | None] = ContextVar("sharing", default=None)
waited: ContextVar[float] = ContextVar("waited", default=0.0)  # seconds that a run has waited for other runs


def done(asked: Asked) -> Any:
    """Return the result of the work: done here, or by the `Share` of the context."""
    share = sharing.get()
    return asked.alone().result if share is None else share.ask(asked)


@contextmanager
def outside_turn() -> Iterator[None]:
    """Let other requests of an `Engine` go on during the block, which draws nothing, such as to write a PNG.

    Outside of an engine it does nothing. Raises CancelledError after the block if the request was cancelled meanwhile.
    """
    share = sharing.get()
    if share is None:
        yield
        return
    with share.outside():
        yield


@dataclass(frozen=True, eq=False)
class AskedStep:
    """A step that a run wants to take, and the steps up to `stop` after it: the arguments of its `step_alone`."""

    loop: StepTaker
    x_t: Tensor  # (N, H, W, C) float32
    i: int
    stop: int  # the run wants the result of the step before it
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

    @property
    def device(self) -> torch.device:
        """The model's."""
        return cast(torch.device, self.loop.denoiser.device)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """See `Loop.key`."""
        return (*self.loop.key(self.x_t, self.earlier), self.weights)

    def alone(self) -> Taken:
        """Take the step. Its result is x_{t-1} and x0, and the next step's `earlier` if there is one."""
        return self.after(1, self.loop.step_alone(*self.arguments))

    def after(self, steps: int, result: tuple[Tensor, ...]) -> Taken:
        """Return the result of the last of some steps, and the steps that follow."""
        if self.i + steps == self.stop:
            return Taken(result, None, steps)
        x_t, _, *kept = result
        earlier = None if self.earlier is None else _replaced(self.earlier, self.part, kept[0])
        x_t = _replaced(self.x_t, self.part, x_t)
        return Taken(result, replace(self, x_t=x_t, i=self.i + steps, earlier=earlier), steps)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `step_alone` and `graph_call`."""
        return self.x_t, self.i, self.noise, self.part, *(() if self.earlier is None else (self.earlier,))


def _replaced(whole: Tensor, part: slice, rows: Tensor) -> Tensor:
    """Return a tensor with other rows in a part."""
    return rows if len(rows) == len(whole) else torch.cat([whole[: part.start], rows, whole[part.stop :]])


@dataclass(frozen=True, eq=False)
class AskedDecode:
    """Latents that a run wants to decode."""

    vae: Any  # a DecoderLike
    decode: Callable[[Tensor], Tensor]  # (N, h, w, C) -> (N, H, W, C')
    latents: Tensor

    @property
    def changed(self) -> bool:
        """Return False: no adapter changes a VAE."""
        return False

    @property
    def pictures(self) -> int:
        """The number of pictures."""
        return len(self.latents)

    @property
    def device(self) -> torch.device:
        """The latents'."""
        return self.latents.device

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """All that changes shapes or launches."""
        state = getattr(self.vae, "weights_state", None)
        return "decode", id(self.vae), self.latents.shape[1:], self.latents.dtype, state

    def alone(self) -> Taken:
        """Decode the latents."""
        return Taken(self.decode(self.latents))


def decode_together(asked: Sequence[AskedDecode]) -> list[Taken]:
    """Decode latents in batches of 16, 8, 4, 2 and 1 pictures, so that few graphs are captured."""
    whole, sizes = torch.cat([each.latents for each in asked]), list[int]()
    while sum(sizes) < len(whole):
        sizes.append(min(16, 1 << ((len(whole) - sum(sizes)).bit_length() - 1)))
    decoded = torch.cat([asked[0].decode(part) for part in whole.split(sizes)])
    return [Taken(part) for part in decoded.split([each.pictures for each in asked])]


class _Batch:
    """Steps of the same runs, taken together again and again. It remembers what stays the same from step to step."""

    def __init__(self, asked: Sequence[AskedStep], size: int):
        """size: the rows of its graphs."""
        self._size, self._halves = size, asked[0].loop.halves
        self._fixed = self._joined(asked)
        self._asked = asked  # keeps the loops alive, so that no other loop has their ids
        self._moments: Moments | None = None
        self._begins = [0] * len(asked)  # the first step of `_moments` of each run
        self._rows: tuple[Tensor, ...] = ()  # the last results: all rows, and the rows of each run
        self._parts: list[tuple[Tensor, ...]] = []

    def take(self, asked: Sequence[AskedStep], goes_on: GoesOn) -> list[Taken]:
        """Take a step of each run, and the steps after it while `goes_on` and all runs want more."""
        most, steps = min(each.stop - each.i for each in asked), 1
        follows, self._parts = self._ended_at(asked), []
        self._take(asked, 0, follows=follows)
        while steps < most and goes_on():
            self._take(asked, steps, follows=True)
            steps += 1
        counts = [each.pictures for each in asked]
        self._parts = list(zip(*(rows[: sum(counts)].split(counts) for rows in self._rows), strict=True))
        return [each.after(steps, part) for each, part in zip(asked, self._parts, strict=True)]

    def _take(self, asked: Sequence[AskedStep], ahead: int, *, follows: bool) -> None:
        """Take the steps that are `ahead` of these. follows: whether they begin with the rows of the last ones."""
        step, temb, timesteps = self._moment(asked, ahead)
        x_t = self._rows[0] if follows else self._join([each.x_t[each.part] for each in asked])
        earlier: Tensor | Fixed = self._fixed.zeros
        if asked[0].earlier is not None:
            kept = [cast(Tensor, each.earlier)[each.part] for each in asked]
            earlier = self._rows[2] if follows else self._join(kept)
        noise: Tensor | Fixed = self._fixed.seeds
        if asked[0].loop.draws_outside:
            noise = self._join([each.loop.drawn(each.x_t, each.noise, each.part) for each in asked])
        wanted = (0, 1) if asked[0].earlier is None else (0, 1, 2)
        run = asked[0].loop.graph()
        self._rows = run(x_t, step, (temb, timesteps), earlier, self._fixed.constants, noise, wanted=wanted)

    def _ended_at(self, asked: Sequence[AskedStep]) -> bool:
        """Whether these steps begin where the last ones ended, so that their rows need not be joined again."""
        return bool(self._parts) and all(
            each.x_t is x_t and (each.earlier is None if not kept else each.earlier is kept[0])
            for each, (x_t, _, *kept) in zip(asked, self._parts, strict=True)
        )

    def _moment(self, asked: Sequence[AskedStep], ahead: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the steps read of their time. The moments of several steps are joined at a time."""
        j = asked[0].i + ahead - self._begins[0]
        is_known = self._moments is not None and 0 <= j < len(self._moments.step)
        if not is_known or any(each.i + ahead != i + j for each, i in zip(asked, self._begins, strict=True)):
            self._begins, j = [each.i + ahead for each in asked], 0
            self._moments = self._joined_moments(asked)
        assert self._moments is not None
        step, temb, timesteps = self._moments
        return step[j], temb[j], timesteps[j]

    def _joined_moments(self, asked: Sequence[AskedStep]) -> Moments:
        """Return moments with the steps in front, so that the part of a step is contiguous, as kernels want it."""
        moments = [each.loop.moments(i, each.part, AHEAD) for each, i in zip(asked, self._begins, strict=True)]
        count = min(each.step.shape[1] for each in moments)
        parts = ([each[:, :count] for each in its] for its in zip(*moments, strict=True))
        halves = 1, self._halves, self._halves
        joined = (self._join(each, halves=count) for each, count in zip(parts, halves, strict=True))
        return Moments(*(each.transpose(0, 1).contiguous() for each in joined))

    def _joined(self, asked: Sequence[AskedStep]) -> FixedInputs:
        """Return the inputs of the graph that stay the same."""
        inputs = [each.loop.fixed(each.part, each.x_t) for each in asked]
        counts, each_half = [each.pictures for each in asked], partial(self._join, halves=self._halves)
        parts = [cast(Constants, each.constants.tensors) for each in inputs]
        tables = [part.rows.expand(count, -1, -1) for part, count in zip(parts, counts, strict=True)]
        constants = Constants(
            rows=self._join(tables),
            guidance_scale=self._join([part.guidance_scale for part in parts]),
            text=map_tensors(lambda *each: each_half(each), *(part.text for part in parts)),
            inputs=map_tensors(lambda *each: each_half(each), *(part.inputs for part in parts)),
            control=self._joined_controls([part.control for part in parts], counts),
        )
        seeds, zeros = (self._join([fixed.tensors for fixed in each]) for each in list(zip(*inputs, strict=True))[1:])
        return FixedInputs(Fixed(constants), Fixed(seeds), Fixed(zeros))

    def _joined_controls(self, controls: Sequence[tuple[Any, ...]], counts: Sequence[int]) -> tuple[Any, ...]:
        """Join the control pictures of each ControlNet. What the pictures of a run share is equal in all runs.

        counts: the pictures of each run, whose control has an entry for each picture of one half or of each.
        """
        joined = []
        for nets in zip(*controls, strict=True):
            halves = len(nets[0][0]) // counts[0]
            joined.append((self._join([pictures for pictures, _ in nets], halves=halves), nets[0][1]))
        return tuple(joined)

    def _join(self, parts: Sequence[Any], *, halves: int = 1) -> Tensor:
        """Join tensors (halves * n, ...) to (halves * size, ...): each half has all pictures, and the last again."""
        whole = torch.cat([part.unflatten(0, (halves, -1)) for part in parts], dim=1)
        missing = self._size - whole.shape[1]
        if missing:
            whole = torch.cat([whole, whole[:, -1:].expand(-1, missing, *whole.shape[2:])], dim=1)
        return whole.flatten(0, 1)


class Company:
    """Does work of several runs together, and remembers the batches that took the last steps."""

    def __init__(self) -> None:
        self._batches: OrderedDict[tuple[Any, ...], _Batch] = OrderedDict()

    def take(self, asked: Sequence[Asked], size: int, goes_on: GoesOn) -> list[Taken]:
        """Do each piece of work. All have the same key.

        Args:
            size: the rows of the graph of a step, at least the number of pictures. Further rows repeat the last one.
            goes_on: whether the next step of all runs may follow at once.
        """
        if asked[0].device.type == "cpu":  # computes each picture on its own anyway
            return [each.alone() for each in asked]
        if isinstance(asked[0], AskedStep):
            return self.as_graph(cast(Sequence[AskedStep], asked), size, goes_on)
        return decode_together(cast(Sequence[AskedDecode], asked))

    def as_graph(self, asked: Sequence[AskedStep], size: int, goes_on: GoesOn) -> list[Taken]:
        """Take the steps together on any device, as one CUDA graph on a GPU."""
        key = (size, *((id(each.loop), each.part.start, each.part.stop) for each in asked))
        if key not in self._batches:
            while len(self._batches) >= REMEMBERED:
                self._batches.popitem(last=False)
            self._batches[key] = _Batch(asked, size)
        self._batches.move_to_end(key)
        return self._batches[key].take(asked, goes_on)

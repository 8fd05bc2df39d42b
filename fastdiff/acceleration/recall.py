"""Keep the conditioning of a run between the calls of a diffusers loop, as our own loop does.

A loop of diffusers gives its denoiser `timesteps[0]`, then `timesteps[1]` and so on, with the same prompt or labels. So
the first call computes the keys and values of the text, and the time's part of all timesteps of a GROUP. The products
come from `diffusion.conditioning`, with the same bits as in a fastdiff pipeline.

torch counts the writes to a tensor (`_version`), so a prompt or a weight that is edited in place is computed again at
once. It does not count writes through `.data`, through numpy, or by a CUDA graph. They take effect when the loop starts
again: nothing is kept for a timestep that is not after the timestep of the call before. Inference tensors have no
count, so nothing is kept for them.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fastdiff.acceleration.layers import plain_modules
from fastdiff.checkpoints.weights import diffusers_keys
from fastdiff.diffusion.conditioning import ConditioningTable
from fastdiff.diffusion.conditions import Conditions
from fastdiff.execution.replaying.trees import Fixed, map_tensors
from fastdiff.models.blocks.conditioning import GROUP, Conditioning, Prompt
from fastdiff.models.denoiser import Denoiser, Recalled

# Both are chosen, not measured. With more pictures the conditioning is a smaller part of a call, and takes more memory:
# for SDXL, 25 MB for each picture.
MOST_PICTURES = 8
CAPACITY = 4  # runs; some loops call a model with several prompts at each step

BLOCKS = ("down_blocks.", "mid_block.", "up_blocks.", "transformer_blocks.")

Places = list[tuple[dict[str, Any], str]]  # of parameters: a module's `_parameters`, and a name in it
Made = TypeVar("Made")


class Recall:
    """The conditioning of the latest runs of a live model; it is the `recall` of our model."""

    def __init__(self, model: nn.Module, ours: Denoiser):
        # our blocks read x and the conditioning; the layers that make a conditioning are outside of them
        self._weights = places_of(model, ours, (name for name in ours.state_dict() if not name.startswith(BLOCKS)))
        self._counts_writes = not any(parameters[name].is_inference() for parameters, name in self._weights)
        self._runs: list[_Run] = []  # the latest first

    def __call__(
        self, denoiser: Denoiser, timestep: Tensor, count: int, class_labels: Tensor | None, prompt: Prompt | None
    ) -> Recalled | None:
        """Return the conditioning of `count` pictures, or None if the call is not a step of a run."""
        place = place_in_vector(timestep)
        if place is None or not self._counts_writes or not _suits(denoiser, count, class_labels, prompt):
            return None
        timesteps, step = place
        texts = () if prompt is None else (prompt.text, *prompt.added, *prompt.timestep_cond)
        given = (timesteps, *texts) if class_labels is None else (timesteps, *texts, class_labels)
        if any(tensor.is_inference() for tensor in given):
            return None
        stream = None
        if denoiser.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return None
            stream = torch.cuda.current_stream(denoiser.device)
        run = next((run for run in self._runs if run.reads(given, stream)), None)
        others = [each for each in self._runs if each is not run and each.is_alive()][: CAPACITY - 1]
        if run is None or step <= run.step:
            run, self._runs = None, others  # free the memory of runs that have ended
            run = _Run(denoiser, given, stream, self._writes(), _conditions(count, class_labels, prompt))
        self._runs = [run, *others]
        temb, timesteps, _ = run.at(step)
        beside = () if prompt is None else (*prompt.bias, *prompt.images)
        return Recalled((temb, timesteps), run.text_beside(beside))

    def forget_changes(self) -> bool:
        """Drop runs from before the latest write to the weights. Return whether there were any."""
        if not self._runs:
            return False
        before, writes = self._runs, self._writes()
        self._runs = [run for run in before if run.writes == writes]
        return len(self._runs) < len(before)

    def forget(self) -> None:
        """Drop all runs."""
        self._runs = []

    def _writes(self) -> list[int]:
        """Return the number of writes to each weight that a conditioning depends on."""
        return [parameters[name]._version for parameters, name in self._weights]


class Kept(Generic[Made]):
    """Keeps what layers of a live model make of the tensors of a loop, until torch counts a write."""

    def __init__(self, places: Places):
        """places: of the parameters of the layers."""
        self._places = places
        self._made: list[tuple[Sources, tuple[Any, ...], Made]] = []  # the latest first
        self._begins = False

    def begin(self) -> None:
        """Make what the next call reads anew, whether or not torch has counted writes."""
        self._begins = True

    def forget(self) -> None:
        """Drop everything."""
        self._made = []

    def find(self, given: Sequence[Tensor], make: Callable[[], Made]) -> Made | None:
        """Return what is kept of these tensors, or the result of `make`; None if writes are not counted."""
        weights = [parameters[name] for parameters, name in self._places]
        is_cuda = given[0].device.type == "cuda"
        counts_writes = not any(each.is_inference() for each in (*weights, *given))
        if not counts_writes or (is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        stream = torch.cuda.current_stream(given[0].device) if is_cuda else None
        state = (stream, [each._version for each in weights])
        known = next((each for each in self._made if each[1] == state and each[0].are(given)), None)
        others = [each for each in self._made if each is not known and each[0].exist()][: CAPACITY - 1]
        if known is None or self._begins:
            self._made, known = others, None  # freed before more is made
        latest = (Sources(given), state, make()) if known is None else known
        self._made = [latest, *others]
        self._begins = False
        return latest[2]


class Sources:
    """The tensors that something was made of: weak references to them, and the writes to them."""

    def __init__(self, given: Sequence[Tensor]):
        self._given = [(weakref.ref(viewed(tensor)), state_of(tensor)) for tensor in given]

    def are(self, given: Sequence[Tensor]) -> bool:
        """Whether they are these tensors, and nothing was written to them since.

        In guess mode, a loop gives a ControlNet another view of half the text at each step.
        """
        return len(given) == len(self._given) and all(
            known() is viewed(tensor) and state == state_of(tensor)
            for (known, state), tensor in zip(self._given, given, strict=True)
        )

    def exist(self) -> bool:
        """Whether the tensors still exist."""
        return all(known() is not None for known, _ in self._given)


class Loop:
    """The loop that calls a model, known by its timesteps."""

    def __init__(self) -> None:
        self._vector: weakref.ref[Tensor] | None = None
        self._first = self._latest = 0  # indices in the vector

    def begins(self, timestep: Any) -> bool:
        """Whether a call is the first of a run. It may be if its timestep is no element of a vector."""
        is_counted = isinstance(timestep, Tensor) and not timestep.is_inference()
        place = place_in_vector(timestep) if is_counted else None
        if place is None:
            return True
        vector, index = place
        is_same = self._vector is not None and self._vector() is vector
        begins = not is_same or index < self._latest or index == self._first
        self._vector, self._latest = weakref.ref(vector), index
        if begins:
            self._first = index
        return begins


class _Run:
    """The conditioning of calls with the same timesteps, labels and prompt, on one stream of a GPU."""

    def __init__(
        self, denoiser: Denoiser, given: tuple[Tensor, ...], stream: Any, writes: list[int], conditions: Conditions
    ):
        self.step = -1  # of the latest call
        self.writes = writes
        self._stream = stream
        self._given = Sources(given)
        with torch.inference_mode(False), torch.no_grad():
            self._table = ConditioningTable(denoiser, given[0].detach(), conditions, chunk=GROUP)
        self._others: tuple[Tensor, ...] = ()
        self._text = Fixed(self._table.text)

    def at(self, step: int) -> Conditioning:
        self.step = step
        with torch.inference_mode(False), torch.no_grad():
            return self._table.at(step)

    def text_beside(self, others: tuple[Tensor, ...]) -> Fixed:
        """Return `Conditioning.text`: what is made of the text, then `others`.

        It is one object as long as `others` are the same tensors, so that a graph copies it at the first step only.
        """
        is_same = len(others) == len(self._others) and all(map(operator.is_, others, self._others))
        if not is_same:
            self._others, self._text = others, Fixed((*self._table.text, *others))
        return self._text

    def reads(self, given: tuple[Tensor, ...], stream: Any) -> bool:
        """Whether these are the tensors of this run, and nothing was written to them since it began."""
        return stream == self._stream and self._given.are(given)

    def is_alive(self) -> bool:
        """Whether its tensors still exist."""
        return self._given.exist()


def places_of(model: nn.Module, ours: Denoiser, names: Iterable[str]) -> Places:
    """Return the places of the live parameters that parameters of ours with these names share.

    Parameters that we have in 8 bits are left out, as torch refuses writes to them.
    """
    keys = {key for name in names for key in diffusers_keys(ours, name)}
    return [
        (module._parameters, name)
        for path, module in plain_modules(model)
        for name in module._parameters
        if (f"{path}.{name}" if path else name) in keys
    ]


def place_in_vector(timestep: Tensor) -> tuple[Tensor, int] | None:
    """Return the vector that a timestep is an element of, and its index; None if it is no element of a vector."""
    vector = timestep._base
    if vector is None or vector.ndim != 1 or not vector.is_contiguous() or vector.dtype != timestep.dtype:
        return None
    if timestep.numel() > 1 and timestep.stride(0):  # not an element that was expanded
        return None
    return vector, int(timestep.storage_offset() - vector.storage_offset())


def _suits(denoiser: Denoiser, count: int, class_labels: Tensor | None, prompt: Prompt | None) -> bool:
    if denoiser.config.num_timestep_embeds is not None:  # an embedding must not see the other timesteps unchecked
        return False
    return count <= MOST_PICTURES or (class_labels is None and prompt is None)


def _conditions(count: int, class_labels: Tensor | None, prompt: Prompt | None) -> Conditions:
    """Return a condition for each picture, or one for all if they do not differ.

    Its tensors are aliases, so that a run does not keep the caller's tensors alive.
    """
    labels = None if class_labels is None else class_labels.detach()
    if prompt is not None:
        prompt = map_tensors(Tensor.detach, prompt._replace(bias=(), images=()))
        labels = None if labels is None else labels.expand(count, *labels.shape[1:])
    return Conditions(labels, torch.arange(count), prompt=prompt)


def viewed(tensor: Tensor) -> Tensor:
    """Return the tensor that a tensor is a view of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def state_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what changes with a tensor's memory, form and values."""
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

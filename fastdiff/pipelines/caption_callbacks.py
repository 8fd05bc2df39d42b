"""Run a user's `callback_on_step_end` after each step of Z-Image, as diffusers does.

The states of captions are lists with a tensor (L, C) for each picture. A callback may return states of other lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.diffusion.conditions import Conditions, Guidance
from fastdiff.errors import InputError
from fastdiff.execution.tensors import REAL, tensor
from fastdiff.kinds import NotNegative
from fastdiff.pipelines.callbacks import Callback, RunningPipeline, check_callback
from fastdiff.pipelines.captions import conditions_of
from fastdiff.pipelines.prompted import Group
from fastdiff.schema import checked

LATENTS = "latents"
STATES = ("prompt_embeds", "negative_prompt_embeds")


@dataclass(frozen=True)
class CallbackOptions:
    """The arguments of `ZImagePipeline.stream` about its callback, unchecked."""

    callback_on_step_end: Callback | None = None
    callback_on_step_end_tensor_inputs: Sequence[str] = (LATENTS,)

    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the callback reads. Raises InputError as `check_callback`."""
        return check_callback(self.callback_on_step_end, self.callback_on_step_end_tensor_inputs, (LATENTS, *STATES))


class RunningZImage(RunningPipeline):
    """A ZImagePipeline as a callback sees it."""

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 0


class CaptionCallback:
    """The callback of a run, and what its last call left.

    The callback may edit tensors in place, return new ones, and set `pipe._guidance_scale`. With 0, the following steps
    are unguided.
    """

    def __init__(
        self,
        pipe: RunningZImage,
        options: CallbackOptions,
        timesteps: Tensor,
        states: Sequence[Sequence[Tensor]],
        groups: Sequence[Group],
        guidance: Guidance | None,
        size: tuple[int, int],
    ):
        """Keep copies of the states, because a callback may edit them.

        Args:
            pipe: the pipeline that the callback gets.
            options: the callback and its tensors.
            timesteps: of the run.
            states: of each picture's caption, (L, C), and of its negative caption; () without guidance.
            groups: of the batch.
            guidance: how the run is guided.
            size: (height, width) of the latents.
        """
        assert options.callback_on_step_end is not None
        self._pipe, self._callback, self._timesteps = pipe, options.callback_on_step_end, timesteps
        self._names, self._guidance = options.names(), guidance
        self._groups, self._size = groups, size
        self._states = {name: [each.clone() for each in of] for name, of in zip(STATES, states, strict=True)}
        self._seen = self._copies(), pipe.guidance_scale  # what the conditions of the groups were made of

    def __call__(self, step: int, x: Tensor) -> tuple[Tensor, list[Conditions] | None]:
        """Call the callback. Return x (N, H, W, C), and the conditions of each group, or None if they are unchanged.

        Raises InputError if the next step cannot use what the callback returned.
        """
        own: dict[str, Any] = {LATENTS: x.permute(0, 3, 1, 2)} | self._states
        given = {name: own[name] for name in self._names}
        returned = self._callback(self._pipe, step, self._timesteps[step], given)
        if not isinstance(returned, Mapping):
            raise InputError(f"callback_on_step_end: it returned {shown(returned)}; return a dictionary of tensors")
        if self._pipe._interrupt:
            raise InputError("callback_on_step_end: _interrupt is not supported; use stream, and break out of its loop")
        if LATENTS in returned:
            x = _checked(LATENTS, returned[LATENTS], own[LATENTS]).permute(0, 2, 3, 1).contiguous()
        self._states = {name: self._checked_states(name, returned.get(name, of)) for name, of in self._states.items()}
        return x, self._changed()

    def _checked_states(self, name: str, value: Any) -> list[Tensor]:
        """Return the states that a callback left. Raises InputError unless each picture has a tensor (L, C)."""
        own, of_picture = self._seen[0][name], self._seen[0][STATES[0]][0]
        each = [*value] if isinstance(value, list | tuple | Tensor) else []
        if len(each) != len(own) or (isinstance(value, Tensor) and value.ndim != 3):
            raise InputError(f"callback_on_step_end: {name} must be a list of {len(own)} tensors, one for each picture")
        return [_checked(f"{name}[{i}]", state, of_picture, any_length=True) for i, state in enumerate(each)]

    def _changed(self) -> list[Conditions] | None:
        """Return the conditions of each group, if the states or the guidance scale are new."""
        scale = checked("callback_on_step_end: _guidance_scale", self._pipe._guidance_scale, NotNegative)
        states, before = self._seen
        if scale == before and all(_equal(self._states[name], states[name]) for name in STATES):
            return None
        guidance = None if self._guidance is None or scale == 0 else replace(self._guidance, scale=1 + scale)
        if scale > 0 and not states[STATES[1]]:
            if scale != before:
                raise InputError(
                    f"callback_on_step_end: _guidance_scale {scale:g} in a run without guidance; call the pipeline "
                    "with a guidance_scale above 0"
                )
            guidance = None
        self._seen = self._copies(), scale
        halves = [self._states[name] for name in STATES[: 1 if guidance is None else 2]]
        return [
            conditions_of(
                [half[row] for half in halves for row in group.rows], guidance, self._size, halves[0][0].device
            )
            for group in self._groups
        ]

    def _copies(self) -> dict[str, list[Tensor]]:
        return {name: [each.clone() for each in of] for name, of in self._states.items()}


def _checked(name: str, value: Any, own: Tensor, *, any_length: bool = False) -> Tensor:
    """Return a tensor like `own`, or with another first size. Raises InputError for another shape."""
    tensor(f"callback_on_step_end: {name}", value, REAL)
    fits = value.shape == own.shape if not any_length else value.ndim == 2 and value.shape[1:] == own.shape[1:]
    if not fits or not len(value):
        wanted = f"(L, {own.shape[1]})" if any_length else str(tuple(own.shape))
        raise InputError(f"callback_on_step_end: {name} has shape {tuple(value.shape)}; return it with shape {wanted}")
    return value.to(own)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(some, others, strict=True))

"""A user's function after each step, called as diffusers calls `callback_on_step_end`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.diffusion.conditions import Conditions
from fastdiff.errors import InputError
from fastdiff.execution.cuda_graphs import map_tensors
from fastdiff.execution.tensors import REAL, tensor
from fastdiff.kinds import NotNegative
from fastdiff.schema import checked

Callback = Callable[[Any, int, Tensor, dict[str, Any]], Mapping[str, Any]]

PROMPT_TENSORS = ("prompt_embeds", "add_text_embeds", "add_time_ids")
TENSORS = ("latents", *PROMPT_TENSORS)  # that a callback is given by name and may give back


def check_callback(callback: Any, names: Any, *, of_sdxl: bool) -> tuple[str, ...]:
    """Return the names of the tensors for a callback: `names`, or its own `tensor_inputs`, as diffusers' have.

    Raises InputError for others, and for no function.
    """
    if callback is not None and not callable(callback):
        raise InputError(f"callback_on_step_end: {shown(callback)} is no function; give one, or leave it out")
    names = getattr(callback, "tensor_inputs", names)
    known = TENSORS if of_sdxl else TENSORS[:2]
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    unknown = [name for name in names if name not in known] if is_list else [names]
    if unknown:
        raise InputError(
            f"callback_on_step_end_tensor_inputs: {shown(unknown[0])} is not one of {', '.join(known)}; give a list"
        )
    return tuple(names)


class RunningPipeline:
    """A pipeline as its callback is given it: with all that it has, and what diffusers' have while they draw."""

    def __init__(self, pipe: Any, num_timesteps: int, guidance_scale: float):
        """num_timesteps: calls of the model, which may be more than num_inference_steps."""
        self._pipe = pipe
        self.num_timesteps = num_timesteps
        self._guidance_scale = guidance_scale  # callbacks set it, as those of diffusers do
        self._interrupt = False

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1 and self._pipe.denoiser.config.time_cond_proj_dim is None

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


class StepCallback:
    """The function of a run, and the conditions as it has left them: an entry for each half of each picture.

    Of the halves of a guided batch what guidance leads away from comes first, as in diffusers. Tensors may be edited in
    place or given back, and `pipe._guidance_scale` may be set. Guidance ends where that is at most 1, or where the
    prompts' half alone is given back.
    """

    def __init__(
        self, pipe: RunningPipeline, callback: Callback, names: Sequence[str], timesteps: Tensor, conditions: Conditions
    ):
        self._pipe, self._callback, self._names, self._timesteps = pipe, callback, names, timesteps
        self._conditions = _of_each(conditions)

    def __call__(self, step: int, x: Tensor) -> tuple[Tensor, Conditions | None]:
        """Return x (N, H, W, C) and the conditions after the callback; None where it had no hold of them.

        InputError for a return that no step can go on from.
        """
        own = {"latents": x.permute(0, 3, 1, 2)} | self._of_prompts()
        given = {name: own[name] for name in self._names}
        returned = self._callback(self._pipe, step, self._timesteps[step], dict(given))
        if not isinstance(returned, Mapping):
            raise InputError(f"callback_on_step_end: it returned {shown(returned)}; return a dictionary of tensors")
        if self._pipe._interrupt:
            raise InputError("callback_on_step_end: _interrupt is not supported; draw with stream, and leave its loop")
        given |= {name: self._checked(name, value, own[name]) for name, value in returned.items() if name in own}
        if "latents" in given:
            x = given.pop("latents").to(x).permute(0, 2, 3, 1).contiguous()
        before = self._conditions
        self._set_guidance(ends=any(len(value) < len(own[name]) for name, value in given.items()))
        self._set_prompts(given)
        return x, None if self._conditions is before else self._conditions

    def _of_prompts(self) -> dict[str, Tensor]:
        prompt = self._conditions.prompt
        assert prompt is not None  # of a model that reads a text
        return dict(zip(PROMPT_TENSORS, (prompt.text, *prompt.added), strict=False))

    def _checked(self, name: str, value: Any, own: Tensor) -> Tensor:
        """Return a tensor that was given back. InputError for one that cannot take the place of `own`."""
        tensor(f"callback_on_step_end: {name}", value, REAL)
        counts = {len(own), len(self._conditions.of_pictures)}
        if value.shape[1:] != own.shape[1:] or len(value) not in counts:
            raise InputError(
                f"callback_on_step_end: {name} came back of shape {tuple(value.shape)}; it was {tuple(own.shape)}"
            )
        return value.to(own)

    def _set_guidance(self, *, ends: bool) -> None:
        """Follow the scale that the callback has left on the pipeline."""
        conditions = self._conditions
        if conditions.guidance is None:
            return
        scale = checked("callback_on_step_end: _guidance_scale", self._pipe._guidance_scale, NotNegative)
        if ends or scale <= 1:
            self._conditions = _of_each(replace(conditions, guidance=None))
        elif scale != conditions.guidance.scale:
            self._conditions = replace(conditions, guidance=replace(conditions.guidance, scale=scale))

    def _set_prompts(self, given: Mapping[str, Tensor]) -> None:
        """Put these tensors in the place of their own, of the prompts' half alone where guidance has ended."""
        if not given:
            return
        own, prompt = self._of_prompts(), self._conditions.prompt
        assert prompt is not None
        text, *added = (given[name][-len(each) :] if name in given else each for name, each in own.items())
        self._conditions = replace(self._conditions, prompt=prompt._replace(text=text, added=tuple(added)))


def _of_each(conditions: Conditions) -> Conditions:
    """Return the same conditions with an entry for each half of each picture, which other pictures do not share."""
    halves = [conditions.of_pictures]
    if conditions.guidance is not None:
        halves.insert(0, conditions.guidance.null_conditions)
    rows = torch.cat(halves)
    assert conditions.prompt is not None
    *null, own = torch.arange(len(rows), device=rows.device).split(len(halves[0]))
    return replace(
        conditions,
        of_pictures=own,
        guidance=conditions.guidance and replace(conditions.guidance, null_conditions=null[0]),
        prompt=map_tensors(lambda entries: entries[rows], conditions.prompt),
    )

"""Run a user's `callback_on_step_end` after each step, as diffusers does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.diffusion.conditions import Conditions
from fastdiff.diffusion.known_pixels import KnownPixels
from fastdiff.errors import InputError
from fastdiff.execution.replaying.trees import map_tensors
from fastdiff.execution.tensors import REAL, tensor
from fastdiff.kinds import NotNegative
from fastdiff.pipelines.drawing import Started
from fastdiff.schema import checked

Callback = Callable[[Any, int, Tensor, dict[str, Any]], Mapping[str, Any]]

PROMPT_TENSORS = ("prompt_embeds", "add_text_embeds", "add_time_ids")
TENSORS = ("latents", *PROMPT_TENSORS)  # tensors that a callback may read and return
MASK, MASKED = "mask", "masked_image_latents"  # the same, of inpainting


def tensor_names_of(*, of_sdxl: bool, masked: bool, config: DenoiserConfig) -> tuple[str, ...]:
    """Return the names of the tensors that a callback may read. masked: in a call with a mask. config: the U-Net's."""
    masks = (MASK, MASKED) if config.inpaints else (MASK,)
    return (*(TENSORS if of_sdxl else TENSORS[:2]), *(masks if masked else ()))


def check_callback(callback: Any, names: Any, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tensors that a callback reads: its `tensor_inputs` if it has them, else `names`.

    The callbacks of diffusers.callbacks have `tensor_inputs`. Raises InputError for an unknown name, or if the callback
    is not callable.
    """
    if callback is not None and not callable(callback):
        raise InputError(f"callback_on_step_end: {shown(callback)} is not callable; give a function, or leave it out")
    names = getattr(callback, "tensor_inputs", names)
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    unknown = [name for name in names if name not in known] if is_list else [names]
    if unknown:
        raise InputError(
            f"callback_on_step_end_tensor_inputs: {shown(unknown[0])} is not one of {', '.join(known)}; give a list"
        )
    return tuple(names)


class RunningPipeline:
    """The pipeline as a callback sees it: its own attributes, and those that diffusers' pipelines have during a run."""

    def __init__(self, pipe: Any, num_timesteps: int, guidance_scale: float):
        """num_timesteps: the number of model calls, which may exceed num_inference_steps."""
        self._pipe = pipe
        self.num_timesteps = num_timesteps
        self._guidance_scale = guidance_scale  # callbacks may set it, as in diffusers
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
    """The callback of a run, and the conditions that its last call left.

    A guided batch has two entries for each picture. The unconditional half comes first, as in diffusers. The callback
    may edit tensors in place, return new ones, and set `pipe._guidance_scale`. Guidance ends when the callback sets the
    scale to 1 or less, or returns the conditional half alone.
    """

    def __init__(
        self, pipe: RunningPipeline, callback: Callback, names: Sequence[str], timesteps: Tensor, conditions: Conditions
    ):
        self._pipe, self._callback, self._names, self._timesteps = pipe, callback, names, timesteps
        self._conditions = _of_each(conditions)
        self._masks: Masks | None = None

    def begin(self, started: Started) -> None:
        """Take what the run starts from, before its first step."""
        if started.inputs is not None or isinstance(started.known, KnownPixels):
            prompt = self._conditions.prompt
            assert prompt is not None
            self._masks = Masks(started, 1 if self._conditions.guidance is None else 2, prompt.text.dtype)

    def __call__(self, step: int, x: Tensor) -> tuple[Tensor, Conditions | None]:
        """Call the callback. Return x (N, H, W, C), and the conditions, or None if they are unchanged.

        Raises InputError if the next step cannot use what the callback returned.
        """
        masks = {} if self._masks is None else self._masks.tensors
        own = {"latents": x.permute(0, 3, 1, 2)} | self._of_prompts() | masks
        given = {name: own[name] for name in self._names}
        returned = self._callback(self._pipe, step, self._timesteps[step], dict(given))
        if not isinstance(returned, Mapping):
            raise InputError(f"callback_on_step_end: it returned {shown(returned)}; return a dictionary of tensors")
        if self._pipe._interrupt:
            raise InputError("callback_on_step_end: _interrupt is not supported; use stream, and break out of its loop")
        given |= {name: self._checked(name, value, own[name]) for name, value in returned.items() if name in own}
        if "latents" in given:
            x = given.pop("latents").to(x).permute(0, 2, 3, 1).contiguous()
        before = self._conditions
        self._set_guidance(ends=any(len(value) < len(own[name]) for name, value in given.items()))
        self._set_masks({name: given.pop(name) for name in masks if name in given})
        self._set_prompts(given)
        return x, None if self._conditions is before else self._conditions

    def _of_prompts(self) -> dict[str, Tensor]:
        prompt = self._conditions.prompt
        assert prompt is not None  # only text-to-image pipelines take a callback
        return dict(zip(PROMPT_TENSORS, (prompt.text, *prompt.added), strict=False))

    def _checked(self, name: str, value: Any, own: Tensor) -> Tensor:
        """Return a tensor that the callback returned. Raises InputError if it cannot replace `own`."""
        tensor(f"callback_on_step_end: {name}", value, REAL)
        counts = {len(own), len(self._conditions.of_pictures)}
        if value.shape[1:] != own.shape[1:] or len(value) not in counts:
            raise InputError(
                f"callback_on_step_end: {name} has shape {tuple(value.shape)}; return it with shape {tuple(own.shape)}"
            )
        return value.to(own)

    def _set_guidance(self, *, ends: bool) -> None:
        """Apply the guidance scale that the callback left on the pipeline, or end guidance."""
        conditions = self._conditions
        if conditions.guidance is None:
            return
        scale = checked("callback_on_step_end: _guidance_scale", self._pipe._guidance_scale, NotNegative)
        if ends or scale <= 1:
            self._conditions = _of_each(replace(conditions, guidance=None))
        elif scale != conditions.guidance.scale:
            self._conditions = replace(conditions, guidance=replace(conditions.guidance, scale=scale))

    def _set_masks(self, given: dict[str, Tensor]) -> None:
        if self._masks is None:
            return
        count, halves = len(self._conditions.of_pictures), 1 if self._conditions.guidance is None else 2
        if self._masks.set({name: each[-count * halves :] for name, each in given.items()}, halves):
            self._conditions = replace(self._conditions)  # so that the loop reads its inputs again

    def _set_prompts(self, given: Mapping[str, Tensor]) -> None:
        """Replace the prompt's tensors by those in `given`. If guidance has ended, keep the conditional half alone."""
        if not given:
            return
        own, prompt = self._of_prompts(), self._conditions.prompt
        assert prompt is not None
        text, *added = (given[name][-len(each) :] if name in given else each for name, each in own.items())
        self._conditions = replace(self._conditions, prompt=prompt._replace(text=text, added=tuple(added)))


class Masks:
    """The mask and the masked picture's latents of a run, as a callback sees them: an entry for each half."""

    def __init__(self, started: Started, halves: int, dtype: torch.dtype):
        """started: of inpainting. dtype: the U-Net's."""
        self._known = started.known if isinstance(started.known, KnownPixels) else None
        inputs = started.inputs
        self._places = {} if inputs is None else {MASK: inputs[..., :1], MASKED: inputs[..., 1:]}
        found = self._places if self._known is None else {MASK: self._known.painted}
        self.tensors = {
            name: torch.cat([each.permute(0, 3, 1, 2)] * halves).to(dtype, copy=True) for name, each in found.items()
        }
        self._before = {name: each.clone() for name, each in self.tensors.items()}

    def set(self, given: dict[str, Tensor], halves: int) -> bool:
        """Give the run the tensors that a callback returned or edited. Return whether its model reads other inputs.

        Raises InputError if the halves of a model's inputs differ.
        """
        changed = {name: each for name, each in given.items() if not _equal(each, self._before[name])}
        for name, each in changed.items():
            first, *others = each.chunk(halves)
            if self._known is not None:
                self._known.set_mask(first.permute(0, 2, 3, 1))
            elif others and not torch.equal(first, others[0]):
                raise InputError(f"callback_on_step_end: {name} differs in its halves; return the same for both")
            else:
                self._places[name].copy_(first.permute(0, 2, 3, 1))
        self.tensors = self.tensors | given
        self._before |= {name: each.clone() for name, each in changed.items()}
        return bool(changed) and self._known is None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _of_each(conditions: Conditions) -> Conditions:
    """Return the conditions with separate entries for each picture, one for each half, so that pictures share none."""
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

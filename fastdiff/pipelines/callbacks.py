"""A user's function after each step, called as diffusers calls `callback_on_step_end`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.diffusion.conditions import Conditions
from fastdiff.errors import InputError
from fastdiff.execution.tensors import REAL, tensor

Callback = Callable[[Any, int, Tensor, dict[str, Any]], Mapping[str, Any]]

OF_PROMPTS = ("prompt_embeds", "add_text_embeds", "add_time_ids")
TENSORS = ("latents", *OF_PROMPTS)  # that a callback is given by name and may give back


def check_callback(callback: Any, names: Any, *, of_sdxl: bool) -> tuple[str, ...]:
    """Return the names of the tensors that a callback asks for. Raises InputError for others, and for no function."""
    if callback is not None and not callable(callback):
        raise InputError(f"callback_on_step_end: {shown(callback)} is no function; give one, or leave it out")
    known = TENSORS if of_sdxl else TENSORS[:2]
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    unknown = [name for name in names if name not in known] if is_list else [names]
    if unknown:
        raise InputError(
            f"callback_on_step_end_tensor_inputs: {shown(unknown[0])} is not one of {', '.join(known)}; give a list"
        )
    return tuple(names)


@dataclass
class StepCallback:
    """The function of a run, and the conditions as it has left them: an entry for each half of each picture.

    Of the halves of a guided batch what guidance leads away from comes first, as in diffusers. Tensors may be edited in
    place or given back. Where it gives back the prompts' half alone, guidance ends.
    """

    pipe: Any
    callback: Callback
    names: Sequence[str]
    timesteps: Tensor
    conditions: Conditions

    def __call__(self, step: int, x: Tensor) -> tuple[Tensor, Conditions | None]:
        """Return x (N, H, W, C) and the conditions after the callback; None where it had no hold of them."""
        own = self._tensors(x)
        given = {name: own[name] for name in self.names}
        returned = self.callback(self.pipe, step, self.timesteps[step], dict(given))
        if not isinstance(returned, Mapping):
            raise InputError(f"callback_on_step_end: it returned {shown(returned)}; return a dictionary of tensors")
        given |= {name: self._checked(name, value, own[name]) for name, value in returned.items() if name in own}
        if "latents" in given:
            x = given.pop("latents").to(x).permute(0, 2, 3, 1).contiguous()
        if not given:
            return x, None
        self.conditions = self._changed(given)
        return x, self.conditions

    def _tensors(self, x: Tensor) -> dict[str, Tensor]:
        return {"latents": x.permute(0, 3, 1, 2)} | self._of_prompts()

    def _of_prompts(self) -> dict[str, Tensor]:
        prompt = self.conditions.prompt
        assert prompt is not None  # of a model that reads a text
        return dict(zip(OF_PROMPTS, (prompt.text, *prompt.added), strict=False))

    def _checked(self, name: str, value: Any, own: Tensor) -> Tensor:
        """Return a tensor that was given back. InputError for one that cannot take the place of `own`."""
        tensor(f"callback_on_step_end: {name}", value, REAL)
        counts = {len(own), len(self.conditions.of_pictures) if name in OF_PROMPTS else len(own)}
        if value.shape[1:] != own.shape[1:] or len(value) not in counts:
            raise InputError(
                f"callback_on_step_end: {name} came back of shape {tuple(value.shape)}; it was {tuple(own.shape)}"
            )
        return value.to(own)

    def _changed(self, given: Mapping[str, Tensor]) -> Conditions:
        """Return the conditions with these tensors in the place of their own."""
        before, count = self.conditions, len(self.conditions.of_pictures)
        assert before.prompt is not None
        text, *added = (given.get(name, own) for name, own in self._of_prompts().items())
        if before.guidance is None or len(text) > count:
            return replace(before, prompt=before.prompt._replace(text=text, added=tuple(added)))
        added = [each[-count:] for each in added]
        of_pictures = torch.arange(count, device=text.device)
        return Conditions(None, of_pictures, prompt=before.prompt._replace(text=text, added=tuple(added)))

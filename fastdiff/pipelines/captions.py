"""The captions of a ZImagePipeline's call: checked, encoded, and as the conditions of the denoising loop."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Len
from torch import Tensor

from fastdiff.diffusion.conditions import Conditions, Guidance
from fastdiff.diffusion.decoding import check_finite
from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, tensor
from fastdiff.execution.transfers import upload
from fastdiff.kinds import Prompt as Text
from fastdiff.models.blocks.conditioning import Prompt
from fastdiff.models.qwen3 import Qwen3Model
from fastdiff.models.z_image import ZImageTransformer2DModel, rounded_up
from fastdiff.pipelines.prompted import Group, groups_of
from fastdiff.pipelines.remembering import Encoded, Remembering
from fastdiff.schema import Wanted, checked, whole
from fastdiff.text.chat_tokenizer import LENGTH, MAX_LENGTH, ChatTokenizer

_log = logging.getLogger(__name__)

Texts = str | Sequence[str] | None
_Texts = Annotated[Text | Annotated[tuple[Text, ...], Len(1, None)], Wanted("a text, or a list of one or more texts")]


@dataclass(frozen=True)
class CaptionOptions:
    """The arguments of `ZImagePipeline.stream` about its captions, unchecked."""

    prompt: Texts = None
    negative_prompt: Texts = None
    prompt_embeds: Any = None
    negative_prompt_embeds: Any = None
    max_sequence_length: int = LENGTH


class CaptionEncoder(Remembering):
    """Qwen3 with its tokenizer. It remembers the prompts that were encoded last; see `remember`.

    Raises InputError if they do not match, or do not fit the transformer that reads their states.
    """

    def __init__(self, model: Qwen3Model, tokenizer: ChatTokenizer, transformer: ZImageTransformer2DModel):
        config, width = model.config, transformer.config.cap_feat_dim
        if config.hidden_size != width:
            raise InputError(
                f"text_encoder: its states have width {config.hidden_size}, and the transformer reads {width}; give "
                "the text encoder that the transformer was trained with"
            )
        if tokenizer.size > config.vocab_size:
            raise InputError(
                f"tokenizer: its ids go up to {tokenizer.size - 1}, and the text encoder has {config.vocab_size} "
                "tokens; give the tokenizer of the text encoder"
            )
        super().__init__([model])
        self.model, self.tokenizer = model, tokenizer

    def encode(self, text: str, length: int, name: str) -> Tensor:
        """Return the states (L, C) of a text with at most `length` tokens. A warning tells what was cut.

        name: what to call the text in the warning.

        Raises NonFiniteError if the states have NaN or infinity.
        """
        tokens = self.tokenizer(text, length)
        if tokens.cut:
            _log.warning(tokens.warning(name))
        return self._once(tuple(tokens.ids), self.model.device, partial(self._encode, tokens.ids)).text

    def _encode(self, ids: Sequence[int]) -> Encoded:
        states = self.model.penultimate_states(torch.tensor([ids]))
        check_finite(states, "text encoder")
        return Encoded(states[0])


class Captions:
    """The captions of a call. Raises InputError that names a wrong argument."""

    def __init__(self, options: CaptionOptions, encoder: CaptionEncoder | None, transformer: ZImageTransformer2DModel):
        self._encoder, self._model = encoder, transformer
        self._length = checked("max_sequence_length", options.max_sequence_length, whole(1, MAX_LENGTH))
        self._embeds = self._given("prompt_embeds", options.prompt_embeds)
        self._texts = _texts("prompt", options.prompt)
        if (self._embeds is None) != bool(self._texts):
            both = "prompt_embeds are also given; leave out one of the two"
            raise InputError(f"prompt: {both if self._texts else 'None; give a text, or prompt_embeds'}")
        self.count = len(self._texts or self._embeds or ())
        self._away_embeds = self._of_each("negative_prompt_embeds", self._given(
            "negative_prompt_embeds", options.negative_prompt_embeds
        ))  # fmt: skip
        self._away_texts = self._of_each("negative_prompt", _texts("negative_prompt", options.negative_prompt))
        if self._away_embeds is not None and self._away_texts:
            raise InputError("negative_prompt: negative_prompt_embeds are also given; leave out one of the two")
        if encoder is None and (self._texts or self._away_texts):
            name = "prompt" if self._texts else "negative_prompt"
            raise InputError(f"{name}: this pipeline has no text encoder; give {name}_embeds")

    def encode(self, *, guided: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states of the captions and, if `guided`, of the negative captions; equal texts share an object."""
        known: dict[str, Tensor] = {}
        own = self._embeds or self._encoded(self._texts, known, "prompt")
        if not guided:
            return own, []
        if self._away_embeds is None and self._encoder is None:
            raise InputError("negative_prompt_embeds: guidance needs them, as there is no text encoder; give them")
        texts = self._away_texts or [""] * self.count
        return own, self._away_embeds or self._encoded(texts, known, "negative prompt")

    def _encoded(self, texts: Sequence[str], known: dict[str, Tensor], name: str) -> list[Tensor]:
        assert self._encoder is not None  # guaranteed by the callers
        for text in texts:
            if text not in known:
                known[text] = self._encoder.encode(text, self._length, name).to(self._model.device, self._model.dtype)
        return [known[text] for text in texts]

    def _given(self, name: str, value: Any) -> list[Tensor] | None:
        """Return given states, one (L, C) for each caption, in the model's dtype and on its device."""
        if value is None:
            return None
        items = [*value] if isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.ndim == 3) else []
        if not items:
            raise InputError(f"{name}: give a list of tensors (L, {self._model.config.cap_feat_dim}), one a prompt")
        for i, each in enumerate(items):
            tensor(f"{name}[{i}]", each, FLOATS)
            if each.ndim != 2 or not len(each) or each.shape[1] != self._model.config.cap_feat_dim:
                wanted = f"(L, {self._model.config.cap_feat_dim})"
                raise InputError(f"{name}[{i}]: its shape is {tuple(each.shape)}; give shape {wanted}")
            if not each.isfinite().all():
                raise InputError(f"{name}[{i}]: it has NaN or infinity; give finite numbers")
        return [each.detach().to(self._model.device, self._model.dtype) for each in items]

    def _of_each(self, name: str, values: list[Any] | None) -> list[Any] | None:
        """Return a value for each caption; one value is for all."""
        if values and len(values) not in (1, self.count):
            raise InputError(f"{name}: {len(values)} given for {self.count} prompts; give one, or one for each")
        return values * self.count if values and len(values) == 1 else values


def caption_groups(
    of_pictures: Sequence[int],
    states: Sequence[Tensor],
    away: Sequence[Tensor],
    guidance: Guidance | None,
    size: tuple[int, int],
    device: torch.device,
) -> list[Group]:
    """Return the groups of a batch: pictures whose captions have equal lengths, with their padding.

    Args:
        of_pictures: the index of each picture's caption.
        states: of each caption, (L, C).
        away: of each negative caption; () without guidance.
        guidance: how the run is guided. Its `null_conditions` are not read.
        size: (height, width) of the latents.
        device: the transformer's device.
    """
    halves = [states, away] if guidance is not None else [states]
    keys = [tuple(rounded_up(len(half[i])) for half in halves) for i in of_pictures]

    def make(rows: list[int], step: int) -> Conditions:
        told = [half[of_pictures[row]] for half in halves for row in rows]
        return conditions_of(told, guidance, size, device)

    return groups_of(keys, 1, make, lambda step: None)


def conditions_of(
    told: Sequence[Tensor], guidance: Guidance | None, size: tuple[int, int], device: torch.device
) -> Conditions:
    """Return the conditions of pictures.

    Args:
        told: the states (L, C) of each picture's caption and, with guidance, then of each one's negative caption.
            Captions that are the same object share a condition.
        guidance, size, device: as in `caption_groups`.
    """
    different = {id(each): each for each in told}
    order = {identity: place for place, identity in enumerate(different)}
    count = len(told) if guidance is None else len(told) // 2
    own, *null = upload([order[id(each)] for each in told], device).split(count)
    guided = None if guidance is None else replace(guidance, null_conditions=null[0])
    return Conditions(None, own, guided, _prompt([*different.values()], size))


def _prompt(states: Sequence[Tensor], size: tuple[int, int]) -> Prompt:
    """Return what `ZImageTransformer2DModel.project` takes."""
    lengths = [len(each) for each in states]
    text = torch.stack([F.pad(each, (0, 0, 0, max(lengths) - len(each))) for each in states])
    return Prompt(text, added=(torch.tensor(lengths), torch.tensor([[*size]] * len(states))))


def _texts(name: str, value: Any) -> list[str]:
    """Return the texts of an argument; none for None."""
    if value is None:
        return []
    found = checked(name, value, _Texts)
    return [found] if isinstance(found, str) else [*found]

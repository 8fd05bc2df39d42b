"""The prompts of a call, given as texts or as embeddings: check them, then encode them.

The arguments have the names that diffusers' StableDiffusionPipeline and StableDiffusionXLPipeline use.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Len
from torch import Tensor

from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, tensor
from fastdiff.kinds import MAX_LAYERS, MAX_PICTURES
from fastdiff.pipelines.encoding import TextEncoders, Weighting
from fastdiff.pipelines.remembering import Encoded
from fastdiff.requests.syntax import Emphasis, PromptSyntax, Tag, split_all
from fastdiff.schema import Wanted, checked, whole
from fastdiff.text.weighted.checking import check_weighted
from fastdiff.text.weighted.schedule import parse_schedule

Texts = str | Sequence[str] | None

_Texts = Annotated[
    str | Annotated[tuple[str, ...], Len(1, MAX_PICTURES)], Wanted(f"a text, or a list of 1 to {MAX_PICTURES} of them")
]


@dataclass(frozen=True)
class PromptOptions:
    """The prompt arguments of a call, as in diffusers."""

    prompt: Texts = None
    prompt_2: Texts = None
    negative_prompt: Texts = None
    negative_prompt_2: Texts = None
    prompt_embeds: Tensor | None = None
    pooled_prompt_embeds: Tensor | None = None
    negative_prompt_embeds: Tensor | None = None
    negative_pooled_prompt_embeds: Tensor | None = None
    clip_skip: int | None = None
    prompt_syntax: str = "plain"
    emphasis: str = "original"


class Moment(NamedTuple):
    """A model call of a run, which decides what a prompt that changes says."""

    step: int = 0
    steps: int = 1


START = Moment()


class Prompts:
    """The prompts and negative prompts of a call. `count` is the number of prompts."""

    def __init__(
        self, options: PromptOptions, encoders: TextEncoders, config: UNet2DConditionConfig, *, zeros_for_none: bool
    ):
        """Check the arguments. Nothing is encoded yet.

        Args:
            config: the U-Net's.
            zeros_for_none: without a negative prompt, the unconditional embeddings are zeros, as for SDXL.

        Raises InputError for arguments that do not match one another or the models.
        """
        self._encoders, self._config, self._zeros_for_none = encoders, config, zeros_for_none
        self._embeds = self._given(options, "prompt")
        self._negative_embeds = self._given(options, "negative_prompt")
        if self._embeds is None and options.prompt is None:
            raise InputError("prompt: this model needs a prompt; give prompt or prompt_embeds")
        self._texts = _texts("prompt", options.prompt, None)
        self.count = len(self._texts) if self._embeds is None else len(self._embeds)
        self._second = self._second_texts("prompt_2", options.prompt_2)
        self._negative = _texts("negative_prompt", options.negative_prompt, self.count)
        self._second_negative = self._second_texts("negative_prompt_2", options.negative_prompt_2)
        self._clip_skip = self._checked_skip(options.clip_skip)
        self._check_counts()
        self._weighted = checked("prompt_syntax", options.prompt_syntax, PromptSyntax) == "weighted"
        self._scaled = checked("emphasis", options.emphasis, Emphasis) == "original"
        self.loras: tuple[Tag, ...] = ()  # that the prompts name
        if self._weighted:
            self._texts, self.loras = split_all(self._texts)
            self._check_syntax()

    @functools.cached_property
    def changes(self) -> bool:
        """Whether a prompt or negative prompt changes during the run."""
        return self._weighted and any(parse_schedule(text).changes for text in self._every_text)

    def count_chunks(self, steps: int, *, guided: bool) -> list[int]:
        """Return the chunks of each prompt and, if `guided`, its negative prompt: the most of the run's steps.

        0 for prompts that are not weighted.
        """
        if not self._weighted:
            return [0] * self.count
        halves = [self._pairs()] if self._embeds is None else []
        if guided and self._negative_embeds is None and (self._negative or not self._zeros_for_none):
            halves.append(self._negative_pairs())
        return [
            max((self._count(pair, steps) for pair in pairs), default=0) for pairs in zip(*halves, strict=True)
        ] or [0] * self.count

    def _count(self, pair: tuple[str, str], steps: int) -> int:
        texts = {self._told(pair, Moment(step, steps)) for step in range(steps if self.changes else 1)}
        return max(map(self._encoders.count_chunks, texts))

    def texts_at(self, moment: Moment) -> tuple[str, ...]:
        """Return all texts at a model call."""
        texts = self._every_text
        return tuple(parse_schedule(text).at(*moment) for text in texts) if self.changes else tuple(texts)

    def encode(self, chunks: Sequence[int] = (), moment: Moment = START) -> list[Encoded]:
        """Return the encoded prompts. Equal texts share one object.

        Args:
            chunks: `count_chunks`, for weighted prompts.
            moment: the model call.
        """
        if self._embeds is not None:
            return self._embeds
        return self._encode_all(self._pairs(), chunks, moment, self._clip_skip, "prompt")

    def encode_negative(
        self, prompts: Sequence[Encoded], chunks: Sequence[int] = (), moment: Moment = START
    ) -> list[Encoded]:
        """Return the unconditional embeddings for each of the encoded `prompts`. clip_skip does not apply to them."""
        if self._negative_embeds is not None:
            return self._negative_embeds
        if not self._negative and self._zeros_for_none:
            return _zeros_like(prompts)
        if not self._encoders.models:
            raise InputError("negative_prompt_embeds: guidance needs them, as there is no text encoder; give them")
        return self._encode_all(self._negative_pairs(), chunks, moment, 0, "negative prompt")

    def stacked(self, count: int, device: torch.device, *, negative: bool) -> tuple[Tensor | None, ...]:
        """Return the embeddings of the prompts and of the negative prompts as tensors, as diffusers' encode_prompt.

        Args:
            count: the rows for each prompt.
            negative: whether to encode the negative prompts. Without it, only given embeddings are returned.

        Returns:
            (prompts, negative prompts), and for SDXL also both pooled; None for what there is not.
        """
        if self.changes:
            raise InputError("prompt: it changes during a run; give encode_prompt each of its texts alone")
        chunks = [max(self.count_chunks(1, guided=negative))] * self.count
        prompts = self.encode(chunks)
        halves = [prompts, self.encode_negative(prompts, chunks) if negative else self._negative_embeds]
        fields = ("text", "pooled") if self._encoders.of_sdxl else ("text",)
        return tuple(
            None
            if half is None
            else torch.stack([getattr(each, field) for each in half]).repeat_interleave(count, 0).to(device)
            for field in fields
            for half in halves
        )

    @functools.cached_property
    def _cache(self) -> dict[tuple, Encoded]:
        return {}

    def _pairs(self) -> list[tuple[str, str]]:
        return list(zip(self._texts, self._second or self._texts, strict=True))

    def _negative_pairs(self) -> list[tuple[str, str]]:
        negative = self._negative or [""] * self.count
        return list(zip(negative, self._second_negative or negative, strict=True))

    @property
    def _every_text(self) -> list[str]:
        return [*self._texts, *self._second, *self._negative, *self._second_negative]

    def _told(self, pair: tuple[str, str], moment: Moment) -> tuple[str, ...]:
        """Return the text for each encoder at a model call."""
        texts = pair[: len(self._encoders.models)]
        return tuple(parse_schedule(text).at(*moment) for text in texts) if self.changes else texts

    def _encode_all(
        self, pairs: Sequence[tuple[str, str]], chunks: Sequence[int], moment: Moment, clip_skip: int, name: str
    ) -> list[Encoded]:
        found = []
        for i, pair in enumerate(pairs):
            weighting = Weighting(self._scaled, chunks[i]) if self._weighted else None
            key = self._told(pair, moment), clip_skip, weighting
            if key not in self._cache:
                self._cache[key] = self._encoders.encode(key[0], clip_skip, name, weighting)
            found.append(self._cache[key])
        return found

    def _check_syntax(self) -> None:
        for text in self._texts:
            check_weighted(text)
        for text in self._second:
            check_weighted(text, "prompt_2")
        for text in (*self._negative, *self._second_negative):
            check_weighted(text, "negative_prompt")

    def _given(self, options: PromptOptions, name: str) -> list[Encoded] | None:
        """Return the given embeddings of `prompt` or `negative_prompt`; None if the caller gave texts instead."""
        embeds, pooled = getattr(options, f"{name}_embeds"), getattr(options, f"{_pooled(name)}_embeds")
        if pooled is not None and not self._encoders.of_sdxl:
            raise InputError(f"{_pooled(name)}_embeds: this model takes none; leave them out")
        if (pooled is not None) != (embeds is not None) and self._encoders.of_sdxl:
            missing, there = (f"{name}_embeds", f"{_pooled(name)}_embeds")[:: 1 if embeds is None else -1]
            raise InputError(f"{missing}: {there} needs them too; give both, from the same encoders")
        if embeds is None:
            return None
        for text in (name, f"{name}_2"):
            if getattr(options, text) is not None:
                raise InputError(f"{text}: {name}_embeds are also given; leave out one of the two")
        self._check_rows(f"{name}_embeds", embeds, ("P", "L", self._config.text_width))
        if pooled is None:
            return [Encoded(text) for text in embeds.detach()]
        self._check_rows(f"{_pooled(name)}_embeds", pooled, (len(embeds), self._encoders.pooled_width))
        return [Encoded(*each) for each in zip(embeds.detach(), pooled.detach(), strict=True)]

    @staticmethod
    def _check_rows(name: str, value: Any, shape: tuple[int | str, ...]) -> None:
        """Raise InputError unless `value` is a tensor of finite numbers with this shape. A letter matches any size."""
        tensor(name, value, FLOATS)
        fits = value.ndim == len(shape) and value.numel()
        if not fits or any(size not in (found, "P", "L") for size, found in zip(shape, value.shape, strict=True)):
            wanted = ", ".join(map(str, shape))
            raise InputError(f"{name}: its shape is {tuple(value.shape)}; give shape ({wanted})")
        if not value.isfinite().all():
            raise InputError(f"{name}: it has NaN or infinity; give finite numbers")

    def _second_texts(self, name: str, value: Texts) -> list[str]:
        if value is not None and len(self._encoders.models) < 2:
            raise InputError(f"{name}: this model has no second text encoder; leave it out")
        is_empty = isinstance(value, str) and not value  # diffusers then uses the first prompt
        return _texts(name, None if is_empty else value, self.count)

    def _checked_skip(self, clip_skip: Any) -> int:
        if clip_skip is not None and self._embeds is not None:
            raise InputError("clip_skip: prompt_embeds are already encoded; leave it out")
        most = min((model.config.num_hidden_layers for model in self._encoders.models), default=MAX_LAYERS)
        return checked("clip_skip", clip_skip, whole(0, most - self._encoders.of_sdxl) | None) or 0

    def _check_counts(self) -> None:
        for name, texts in (("prompt", self._texts), ("negative_prompt", self._negative)):
            if texts and not self._encoders.models:
                raise InputError(f"{name}: this pipeline has no text encoder; give {name}_embeds")
        if self._negative_embeds is not None and len(self._negative_embeds) not in (1, self.count):
            raise InputError(
                f"negative_prompt_embeds: {len(self._negative_embeds)} given for {self.count} prompts; "
                "give one, or one for each"
            )
        if self._negative_embeds is not None and len(self._negative_embeds) < self.count:
            self._negative_embeds = self._negative_embeds * self.count


def _pooled(name: str) -> str:
    """Return the pooled form of an argument's name: negative_prompt -> negative_pooled_prompt."""
    return name.replace("prompt", "pooled_prompt")


def _texts(name: str, value: Any, count: int | None) -> list[str]:
    """Return `count` texts; a single text is repeated. None gives no texts. `count` None: as many as are given."""
    if value is None:
        return []
    found = checked(name, value, _Texts)
    texts = [found] if isinstance(found, str) else list(found)
    texts = texts * count if count and len(texts) == 1 else texts
    if count is not None and len(texts) != count:
        raise InputError(f"{name}: {len(texts)} given for {count} prompts; give one, or one for each")
    return texts


def _zeros_like(prompts: Sequence[Encoded]) -> list[Encoded]:
    """Return zeros for each prompt. Prompts of one shape share one object."""
    zeros: dict[Any, Encoded] = {}
    for text, pooled in prompts:
        nothing = Encoded(torch.zeros_like(text), None if pooled is None else torch.zeros_like(pooled))
        zeros.setdefault(text.shape, nothing)
    return [zeros[text.shape] for text, _ in prompts]

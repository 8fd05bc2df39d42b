"""TextEncoders: encode prompts as diffusers' `encode_prompt` does, one prompt at a time."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff.arguments import instance
from fastdiff.checkpoints.configs.unet2d_condition import TIME_IDS, TIME_IDS_OF_REFINER, UNet2DConditionConfig
from fastdiff.diffusion.decoding import check_finite
from fastdiff.errors import InputError
from fastdiff.models.clip import CLIPTextModel, CLIPTextModelWithProjection
from fastdiff.pipelines.remembering import Encoded, Remembering
from fastdiff.text.tokenizer import CLIPTokenizer, Tokens
from fastdiff.text.weighted.chunks import empty_chunk, split_chunks

_log = logging.getLogger(__name__)


class Weighting(NamedTuple):
    """How weighted prompts are encoded, as A1111's options of these names."""

    scaled: bool  # "Original": the weighted embeddings of a chunk get the mean that they had before. Else "No norm"
    chunks: int  # the number of chunks; shorter prompts are filled up with the chunk of an empty prompt


class TextEncoders(Remembering):
    """The text encoders of a pipeline and their tokenizers. Stable Diffusion 1 and 2 have one encoder, SDXL has two.

    They remember the prompts that were encoded last; see `remember`.
    """

    def __init__(
        self, models: Sequence[CLIPTextModel], tokenizers: Sequence[CLIPTokenizer], config: UNet2DConditionConfig
    ):
        """`config`: the U-Net's. Raises InputError if the encoders do not match it, or one another."""
        for model, tokenizer in zip(models, tokenizers, strict=True):
            instance("text_encoder", model, CLIPTextModel, "a CLIPTextModel of fastdiff")
            instance("tokenizer", tokenizer, CLIPTokenizer, "a CLIPTokenizer of fastdiff")
        self.models, self.tokenizers = tuple(models), tuple(tokenizers)
        super().__init__(self.models)
        self.of_sdxl = config.addition_embed_type == "text_time"
        self.of_refiner = self._is_of_refiner(config)
        self.pooled_width = config.pooled_width(TIME_IDS_OF_REFINER if self.of_refiner else TIME_IDS)
        if self.models:
            self._check_tokenizers()
            self._check_kinds(config)
            self._check_widths(config)

    def _check_tokenizers(self) -> None:
        for model, tokenizer in zip(self.models, self.tokenizers, strict=True):
            tokens, positions = model.config.vocab_size, model.config.max_position_embeddings
            if tokenizer.length > positions or tokenizer.size > tokens:
                raise InputError(
                    f"tokenizer: it makes prompts of {tokenizer.length} out of {tokenizer.size} tokens, and its text "
                    f"encoder has {positions} positions and {tokens} tokens; give the tokenizer it was trained with"
                )
            added = 0 if model.added_tokens is None else len(model.added_tokens)
            if added != sum(tokenizer.embeddings.values()):
                raise InputError(
                    "tokenizer: it and its text encoder have different embeddings; call unload_textual_inversion "
                    "before you replace one of them"
                )
        if len({tokenizer.length for tokenizer in self.tokenizers}) > 1:
            raise InputError("tokenizer_2: its length differs from the first tokenizer's; save one of them again")

    def _check_kinds(self, config: UNet2DConditionConfig) -> None:
        last = self.models[-1]
        if not self.of_sdxl:
            if len(self.models) > 1:
                raise InputError("text_encoder_2: only an SDXL U-Net takes a second text encoder; leave it out")
            return
        if not isinstance(last, CLIPTextModelWithProjection):
            raise InputError("text_encoder_2: this U-Net needs its text_embeds; give a CLIPTextModelWithProjection")
        if last.config.projection_dim != self.pooled_width:
            raise InputError(
                f"text_encoder_2: its projection has {last.config.projection_dim} channels, and the U-Net takes "
                f"{self.pooled_width}; give the text encoders that it was trained with"
            )

    def _is_of_refiner(self, config: UNet2DConditionConfig) -> bool:
        """Whether the U-Net reads an aesthetic score instead of a target size, by the width that is left for text."""
        last = self.models[-1] if self.models else None
        width = config.pooled_width(TIME_IDS_OF_REFINER)
        return self.of_sdxl and isinstance(last, CLIPTextModelWithProjection) and last.config.projection_dim == width

    def _check_widths(self, config: UNet2DConditionConfig) -> None:
        widths = [model.config.hidden_size for model in self.models]
        if sum(widths) != config.text_width:
            raise InputError(
                f"text_encoder: {' and '.join(map(str, widths))} channels of text, and the U-Net takes "
                f"{config.text_width}; give the text encoders that it was trained with"
            )

    def encode(
        self, texts: Sequence[str], clip_skip: int = 0, name: str = "prompt", weighting: Weighting | None = None
    ) -> Encoded:
        """Encode a prompt.

        Args:
            texts: one text for each encoder.
            clip_skip: how many of the last layers to skip, in addition to the layers that this kind of pipeline always
                skips.
            name: what to call the prompt in the warning about a prompt that is cut.
            weighting: read the texts as weighted prompts, whose chunks follow one another. None: as they are.

        Raises InputError if there are not so many layers, and NonFiniteError if an encoder's output has NaN or
        infinity.
        """
        if weighting is None:
            self._warn_of_cuts(texts, name)
            encode = partial(self._encode, texts, clip_skip)
        else:
            encode = partial(self._encode_weighted, texts, clip_skip, weighting)
        return self._once((tuple(texts), clip_skip, weighting), self.models[0].device, encode)

    def _warn_of_cuts(self, texts: Sequence[str], name: str) -> None:
        every = self._tokens(texts)
        for warning in filter(None, dict.fromkeys(tokens.warning(name) for tokens in every)):
            _log.warning(warning)

    def _tokens(self, texts: Sequence[str]) -> list[Tokens]:
        pairs = zip(texts, self.tokenizers, strict=True)
        return [tokenizer(tokenizer.expand(text)) for text, tokenizer in pairs]

    def _encode(self, texts: Sequence[str], clip_skip: int) -> Encoded:
        embeds, pooled = [], None
        for tokens, model in zip(self._tokens(texts), self.models, strict=True):
            embed, pooled = self._embed(tokens.ids, model, clip_skip)
            embeds.append(embed)
        return Encoded(torch.cat(embeds, dim=-1)[0], None if pooled is None else pooled[0])

    def _embed(self, ids: Sequence[int], model: CLIPTextModel, clip_skip: int) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings (1, L, C) of one input of an encoder, and for SDXL the pooled (1, C)."""
        given, pooled = torch.tensor([ids]), None
        if self.of_sdxl:
            embed, pooled = model.penultimate_embeds(given, clip_skip)
        else:
            embed = model.prompt_embeds(given, clip_skip)
        check_finite(embed, "text encoder")
        return embed, pooled

    def count_chunks(self, texts: Sequence[str]) -> int:
        """Return the number of chunks of a weighted prompt, given one text for each encoder."""
        return max(len(split_chunks(text, words)) for text, words in zip(texts, self.tokenizers, strict=True))

    def _encode_weighted(self, texts: Sequence[str], clip_skip: int, weighting: Weighting) -> Encoded:
        """Encode each chunk on its own. The pooled text is the first chunk's."""
        embeds, pooled = [], None
        for text, tokenizer, model in zip(texts, self.tokenizers, self.models, strict=True):
            chunks = split_chunks(text, tokenizer)
            chunks += [empty_chunk(tokenizer)] * (weighting.chunks - len(chunks))
            every = [self._embed(chunk.ids, model, clip_skip) for chunk in chunks]
            weighted = [_weighted(z, chunk.weights, weighting) for (z, _), chunk in zip(every, chunks, strict=True)]
            embeds.append(torch.cat(weighted, dim=1))
            _, pooled = every[0]
        return Encoded(torch.cat(embeds, dim=-1)[0], None if pooled is None else pooled[0])


def _weighted(z: Tensor, weights: Sequence[float], weighting: Weighting) -> Tensor:
    """Return the embeddings z (1, L, C) of one chunk of one prompt, times the weight of each token, in float32.

    As A1111's emphasis of one prompt. A batch has no part in the mean, so the bits do not depend on it.
    """
    if all(weight == 1 for weight in weights):
        return z
    wide = z.float()
    weighted = wide * torch.tensor(weights, dtype=torch.float32, device=z.device)[None, :, None]
    if weighting.scaled:
        weighted = weighted * (wide.mean() / weighted.mean())
    weighted = weighted.to(z.dtype)
    check_finite(weighted, "text encoder")
    return weighted

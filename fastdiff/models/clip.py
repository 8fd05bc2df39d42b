"""CLIPTextModel and CLIPTextModelWithProjection: the text encoders of CLIP (Radford et al. 2021, arXiv 2103.00020).

Tokens are (1, L, C): prompts run one at a time, so that their bits do not depend on the batch. A layer is seven
launches: norm, QKV, causal attention, projection; norm, linear with activation, linear. Each norm adds the branch
before it. The first norm adds the positions.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.clip import OLD_END, CLIPConfig, CLIPTextConfig, CLIPTextConfigWithProjection
from fastdiff.errors import InputError
from fastdiff.execution.cpu_workers import map_pictures
from fastdiff.execution.tensors import INDICES, tensor, within
from fastdiff.kernels.attention import attention
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.models.model import Model, takes_options
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked, whole

QKV = ("q_proj", "k_proj", "v_proj")  # three layers in transformers, one here


@read_by_name
class CLIPTextOutput(NamedTuple):
    """The output of CLIPTextModel, like transformers' BaseModelOutputWithPooling."""

    last_hidden_state: Tensor  # (N, L, C), after the final norm
    pooler_output: Tensor  # (N, C), the end token's
    hidden_states: tuple[Tensor, ...] | None = None  # (N, L, C) each: embeddings, then layers' outputs, no norm


@read_by_name
class CLIPTextModelOutput(NamedTuple):
    """The output of CLIPTextModelWithProjection, like transformers' class of this name."""

    text_embeds: Tensor  # (N, projection_dim), the projection of the end token
    last_hidden_state: Tensor  # as in CLIPTextOutput
    hidden_states: tuple[Tensor, ...] | None = None  # as in CLIPTextOutput


class CLIPTextEmbeddings(nn.Module):
    """The token and position tables; transformers' class of this name.

    The vectors of loaded embeddings are in a table of their own, `added`, which is not saved.
    """

    added: Tensor | None  # (R, C), of the token ids from `first_added` on

    def __init__(self, config: CLIPTextConfig):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.register_buffer("added", None, persistent=False)
        self.first_added = config.vocab_size

    def forward(self, input_ids: Tensor) -> "Stream":
        """Embed token ids (1, L). The first norm computes the sum of both embeddings."""
        positions = self.position_embedding.weight[: input_ids.shape[1]]
        return Stream(positions[None], self._tokens(input_ids))

    def _tokens(self, input_ids: Tensor) -> Tensor:
        """(1, L) -> (1, L, C). Each row is a copy of a row of one of the tables."""
        if self.added is None:
            return self.token_embedding(input_ids)
        place, count = input_ids - self.first_added, len(self.added)
        is_added = (place >= 0) & (place < count)
        own = self.token_embedding(input_ids.clamp(max=self.token_embedding.num_embeddings - 1))
        return torch.where(is_added[..., None], F.embedding(place.clamp(0, count - 1), self.added), own)


class Stream(NamedTuple):
    """The tokens between layers: x + branch, or x alone. The norm that reads them computes the sum."""

    x: Tensor  # (1, L, C)
    branch: Tensor | None = None  # (1, L, C)

    def normed(self, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Return the normalised sum and the sum."""
        if self.branch is None:
            alone = layer_norm(self.x, norm.weight, norm.bias, eps=norm.eps)
            assert isinstance(alone, Tensor)
            return alone, self.x
        normed = layer_norm(self.branch, norm.weight, norm.bias, residual=self.x, eps=norm.eps)
        assert isinstance(normed, tuple) and isinstance(normed[0], Tensor)
        return normed[0], normed[1]


class CLIPAttention(nn.Module):
    """Self-attention; transformers' class of this name, with Q, K and V in one projection."""

    def __init__(self, config: CLIPConfig, *, causal: bool):
        super().__init__()
        self.heads, self.causal = config.num_attention_heads, causal
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        qkv = linear(x, self.qkv_proj.weight, self.qkv_proj.bias)  # (1, L, 3 C)
        x = attention(*qkv.chunk(3, dim=-1), heads=self.heads, causal=self.causal)
        return linear(x, self.out_proj.weight, self.out_proj.bias)


class CLIPMLP(nn.Module):
    """Linear, activation, linear; transformers' class of this name."""

    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.activation = config.hidden_act
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = linear(x, self.fc1.weight, self.fc1.bias, activation=self.activation)
        return linear(x, self.fc2.weight, self.fc2.bias)


class CLIPEncoderLayer(nn.Module):
    """Attention and an MLP, each after a norm; transformers' class of this name."""

    def __init__(self, config: CLIPConfig, *, causal: bool):
        super().__init__()
        self.self_attn = CLIPAttention(config, causal=causal)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = CLIPMLP(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, stream: Stream) -> tuple[Stream, Tensor]:
        """Return the stream after this layer, and its input as one tensor."""
        h, before = stream.normed(self.layer_norm1)
        h, x = Stream(before, self.self_attn(h)).normed(self.layer_norm2)
        return Stream(x, self.mlp(h)), before


def encoder_layers(config: CLIPConfig, *, causal: bool) -> nn.ModuleDict:
    """Return the layers of an encoder, as the module `encoder` of transformers' models."""
    layers = (CLIPEncoderLayer(config, causal=causal) for _ in range(config.num_hidden_layers))
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


def stacked_projections(config: CLIPConfig) -> dict[str, dict[str, int]]:
    """Return `Model.stacked` for the attentions of an encoder."""
    attentions = [f"encoder.layers.{i}.self_attn." for i in range(config.num_hidden_layers)]
    return {f"{path}qkv_proj.": {f"{path}{name}.": 1 for name in QKV} for path in attentions}


class CLIPTextModel(Model):
    """The text encoder of CLIP, for Stable Diffusion 1 and 2, and the first one of SDXL.

    It takes the config, weights and call of transformers' CLIPTextModel, for inference only. See Model for how to build
    it. A prompt has the same bits in any batch. ::

        encoder = CLIPTextModel.from_pretrained("path/to/folder", subfolder="text_encoder", device="cuda")
        embeds = encoder(input_ids).last_hidden_state
    """

    config: CLIPTextConfig
    part = registry.TEXT_ENCODER

    @takes_options
    def __init__(self, config: CLIPTextConfig):
        super().__init__(config)
        self.embeddings = CLIPTextEmbeddings(config)
        self.encoder = encoder_layers(config, causal=True)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.stacked = stacked_projections(config)
        self._lay_out()

    def saved_key(self, key: str) -> str:
        return key if key.startswith("text_projection.") else self.config.KEY_PREFIX + key

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: None = None,
        position_ids: None = None,
        output_attentions: Literal[False] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Encode prompts. Arguments and output match transformers' model.

        Args:
            input_ids: (N, L) int64 or int32, with L up to max_position_embeddings. The range of ids is only checked for
                tensors on the CPU.
            attention_mask: not supported: it must be None.
            position_ids: not supported: it must be None.
            output_attentions: not supported: it must be None or False.
            output_hidden_states: whether the output includes hidden_states.
            return_dict: whether to return a named tuple instead of a plain one.

        Returns:
            CLIPTextOutput, or CLIPTextModelOutput from CLIPTextModelWithProjection. A plain tuple leaves out None.

        Raises:
            InputError: for input_ids of another dtype, shape or range, and for an argument that is not supported.
        """
        options = {"attention_mask": attention_mask, "position_ids": position_ids}
        for name, value in (options | {"output_attentions": output_attentions or None}).items():
            if value is not None:
                raise InputError(f"{name}: fastdiff's attention is always causal and returns no weights; leave it out")
        checked("output_hidden_states", output_hidden_states, bool | None)
        checked("return_dict", return_dict, bool)
        last, pooled, hidden = self._run(input_ids, bool(output_hidden_states))
        output = self._output(last, pooled, hidden or None)
        return output if return_dict else tuple(each for each in output if each is not None)

    @property
    def added_tokens(self) -> Tensor | None:
        """The vectors of loaded embeddings (textual inversion), (R, C), in the model's dtype; None without any."""
        return self.embeddings.added

    def add_tokens(self, first: int, vectors: Tensor | None) -> None:
        """Give the token ids from `first` on these vectors, (R, C), instead of all that were added before.

        None takes all added tokens away. The model's own weights do not change, so `state_dict` and `save_pretrained`
        leave the vectors out, and without them the bits are the plain model's. Only this model's graphs are made anew.
        """
        self.embeddings.added = None if vectors is None else vectors.to(self.device, self.dtype, copy=True)
        self.embeddings.first_added = first
        self.times_changed += 1
        self.release_graphs()

    def prompt_embeds(self, input_ids: Tensor, clip_skip: int = 0) -> Tensor:
        """Return the prompt embeddings (N, L, C) that a U-Net of Stable Diffusion 1 or 2 reads.

        As in diffusers' StableDiffusionPipeline.encode_prompt, the last `clip_skip` layers are skipped and the final
        norm is applied. `input_ids` is (N, L). Raises InputError if the model has fewer layers.
        """
        self._check_skip(clip_skip, self.config.num_hidden_layers)
        last, _, hidden = self._run(input_ids, clip_skip > 0)
        if clip_skip == 0:
            return last
        norm = self.final_layer_norm
        normed = layer_norm(hidden[-1 - clip_skip], norm.weight, norm.bias, eps=norm.eps)
        assert isinstance(normed, Tensor)
        return normed

    def penultimate_embeds(self, input_ids: Tensor, clip_skip: int = 0) -> tuple[Tensor, Tensor]:
        """Return the prompt embeddings (N, L, C) that SDXL's U-Net reads, and the end token's output (N, C).

        As in diffusers' StableDiffusionXLPipeline.encode_prompt, the last 1 + `clip_skip` layers and the final norm are
        skipped for the first output. The second one is text_embeds in CLIPTextModelWithProjection. `input_ids` is
        (N, L). Raises InputError if the model has fewer layers.
        """
        self._check_skip(clip_skip, self.config.num_hidden_layers - 1)
        _, pooled, hidden = self._run(input_ids, True)
        return hidden[-2 - clip_skip], pooled

    def _run(self, input_ids: Tensor, with_hidden_states: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Run `_encode` on each prompt. Return (N, L, C), (N, C), and the hidden states or ()."""
        self._check_ids(input_ids)
        encode = self.graphed(("encode", with_hidden_states), partial(self._encode, with_hidden_states))
        last, pooled, *hidden = map(torch.cat, zip(*map_pictures(encode, input_ids.to(self.device)), strict=True))
        return last, pooled, tuple(hidden)

    @torch.no_grad()
    def _encode(self, with_hidden_states: bool, input_ids: Tensor) -> tuple[Tensor, ...]:
        """(1, L) -> (1, L, C) after the final norm, the end token's (1, C), and all hidden states if wanted."""
        stream, hidden = self.embeddings(input_ids), []
        for layer in cast(nn.ModuleList, self.encoder["layers"]):
            stream, before = layer(stream)
            hidden.append(before)
        last, total = stream.normed(self.final_layer_norm)
        end = self.config.eos_token_id
        is_end = input_ids[0] if end == OLD_END else (input_ids[0] == end).int()
        pooled = last[0].index_select(0, is_end.argmax()[None])  # (1, C), of the first end token
        return last, self._project(pooled), *((*hidden, total) if with_hidden_states else ())

    def _project(self, pooled: Tensor) -> Tensor:
        """Project the end token's output, in classes that have a projection."""
        return pooled

    def _output(self, last: Tensor, pooled: Tensor, hidden: tuple[Tensor, ...] | None) -> NamedTuple:
        return CLIPTextOutput(last, pooled, hidden)

    def _check_ids(self, input_ids: Tensor) -> None:
        tensor("input_ids", input_ids, INDICES)
        most = self.config.max_position_embeddings
        if input_ids.ndim != 2 or not input_ids.numel() or input_ids.shape[1] > most:
            raise InputError(
                f"input_ids: its shape is {tuple(input_ids.shape)}; it must be (N, L) with L from 1 to {most}"
            )
        added = self.embeddings.first_added + (0 if self.added_tokens is None else len(self.added_tokens))
        within("input_ids", input_ids, 0, max(self.config.vocab_size, added) - 1)

    def _check_skip(self, clip_skip: int, most: int) -> None:
        checked("clip_skip", clip_skip, whole(0, most))


class CLIPTextModelWithProjection(CLIPTextModel):
    """The text encoder of CLIP with a projection of its pooled output: the second encoder of SDXL.

    It takes the config, weights and call of transformers' CLIPTextModelWithProjection. The rest is as in CLIPTextModel.
    The output has `text_embeds` (N, projection_dim) instead of `pooler_output`.
    """

    config: CLIPTextConfigWithProjection
    whole = ("text_projection.",)
    part = registry.TEXT_ENCODER_2

    @takes_options
    def __init__(self, config: CLIPTextConfigWithProjection):
        super().__init__(config)
        assert config.projection_dim is not None  # guaranteed by the config's check
        self.text_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False)
        self._lay_out()

    def _project(self, pooled: Tensor) -> Tensor:
        return linear(pooled[:, None], self.text_projection.weight)[:, 0]

    def _output(self, last: Tensor, pooled: Tensor, hidden: tuple[Tensor, ...] | None) -> NamedTuple:
        return CLIPTextModelOutput(pooled, last, hidden)

"""Qwen3Model: the causal decoder of Qwen3 (Yang et al. 2025, arXiv 2505.09388), which encodes prompts.

Prompts run one at a time, without their padding, so that their bits do not depend on the batch. Tokens are (1, L, C).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.qwen3 import Qwen3Config
from fastdiff.errors import InputError
from fastdiff.execution.cpu_workers import map_pictures
from fastdiff.execution.tensors import INDICES, WHOLE, tensor, within
from fastdiff.kernels.attention import attention
from fastdiff.kernels.linear import linear
from fastdiff.kernels.rotary import rotary
from fastdiff.kernels.swiglu import swiglu
from fastdiff.models.model import Model, takes_options
from fastdiff.models.rms_norm import RMSNorm
from fastdiff.models.rotary import frequencies
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked

Encode = Callable[[Tensor], tuple[Tensor, ...]]

MASKS = (*WHOLE, torch.bool)
MULTIPLE = 32  # of the tokens that run: prompts of similar lengths share a CUDA graph


@read_by_name
class Qwen3Output(NamedTuple):
    """The output of Qwen3Model, like transformers' BaseModelOutputWithPast. States of padding are zero."""

    last_hidden_state: Tensor  # (N, L, C), after the final norm
    hidden_states: tuple[Tensor, ...] | None = None  # (N, L, C) each: embeddings, layers' outputs; the last is normed


class Qwen3Attention(nn.Module):
    """Causal self-attention with a norm and a rotary embedding of queries and keys; transformers' class of this name.

    Q, K and V are one projection. A head of keys and values serves several heads of queries.
    """

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.heads, self.key_value_heads, self.head_dim = (
            config.num_attention_heads, config.key_value_heads, config.head_dim,
        )  # fmt: skip
        width, bias = self.heads * self.head_dim, config.attention_bias
        all_heads = self.heads + 2 * self.key_value_heads
        self.qkv_proj = nn.Linear(config.hidden_size, all_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = linear(x, self.qkv_proj.weight, self.qkv_proj.bias)
        heads = (self.heads, self.key_value_heads)
        turned, v = qkv.split((sum(heads) * self.head_dim, heads[1] * self.head_dim), dim=-1)
        norms, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        qk = rotary(turned, cos[None], sin[None], norms, queries=self.heads, eps=eps, halves=True)
        q, k = qk.split([each * self.head_dim for each in heads], dim=-1)
        x = attention(q, k, v, heads=self.heads, causal=True)
        return linear(x, self.o_proj.weight, self.o_proj.bias)


class Qwen3MLP(nn.Module):
    """SwiGLU, then a projection; transformers' class of this name, with its first two layers as one."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(swiglu(x, self.gate_up_proj.weight), self.down_proj.weight)


class Qwen3DecoderLayer(nn.Module):
    """Attention and an MLP, each after a norm; transformers' class of this name."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.self_attn = Qwen3Attention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, branch: Tensor | None, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return (branch, x) after this layer. The tokens are the sum of both; the norms compute it."""
        norm = self.input_layernorm
        h, x = (norm(x), x) if branch is None else norm.added(branch, x)
        h, x = self.post_attention_layernorm.added(self.self_attn(h, cos, sin), x)
        return self.mlp(h), x


class Qwen3Model(Model):
    """The decoder of Qwen3 as a text encoder, for Z-Image.

    It takes the config, weights and call of transformers' Qwen3Model, for inference only, without a cache of keys.
    Folders of Qwen3ForCausalLM load too. See Model for how to build it. A prompt has the same bits in any batch. ::

        encoder = Qwen3Model.from_pretrained("path/to/folder", subfolder="text_encoder", device="cuda")
        states = encoder(input_ids, attention_mask, output_hidden_states=True).hidden_states[-2]
    """

    config: Qwen3Config
    part = registry.QWEN3

    @takes_options
    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        groups = config.num_attention_heads // config.key_value_heads
        for i in range(config.num_hidden_layers):
            attn, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
            shares = {"q_proj": groups, "k_proj": 1, "v_proj": 1}
            self.stacked[f"{attn}qkv_proj."] = {f"{attn}{name}.": share for name, share in shares.items()}
            self.stacked[f"{mlp}gate_up_proj."] = {f"{mlp}gate_proj.": 1, f"{mlp}up_proj.": 1}
        self._lay_out()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: None = None,
        past_key_values: None = None,
        inputs_embeds: None = None,
        use_cache: Literal[False] | None = None,
        output_attentions: Literal[False] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Encode prompts. Arguments and output match transformers' model.

        Args:
            input_ids: (N, L) int64 or int32. The range of ids is only checked for tensors on the CPU.
            attention_mask: (N, L) whole numbers or bool: 1 for tokens, 0 for padding before or after them. By default
                all are tokens.
            position_ids: not supported: it must be None. Positions count from a prompt's first token.
            past_key_values: not supported: it must be None.
            inputs_embeds: not supported: it must be None.
            use_cache: not supported: it must be None or False.
            output_attentions: not supported: it must be None or False.
            output_hidden_states: whether the output includes hidden_states.
            return_dict: whether to return a named tuple instead of a plain one.

        Returns:
            Qwen3Output. The states of padding are zero. A plain tuple leaves out None.

        Raises:
            InputError: for a tensor of another dtype, shape or range, a mask with a gap or without a token, and an
                argument that is not supported.
        """
        refused = {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        refused |= {"use_cache": use_cache or None, "output_attentions": output_attentions or None}
        for name, value in refused.items():
            if value is not None:
                raise InputError(
                    f"{name}: fastdiff encodes whole prompts from token ids, and keeps nothing; leave it out"
                )
        checked("output_hidden_states", output_hidden_states, bool | None)
        checked("return_dict", return_dict, bool)
        encode = self._all_states if output_hidden_states else self._last_state
        last, *hidden = self._run(input_ids, attention_mask, encode)
        output = Qwen3Output(last, tuple(hidden) or None)
        return output if return_dict else tuple(each for each in output if each is not None)

    def penultimate_states(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return `hidden_states[-2]` (N, L, C), which Z-Image reads. The last layer and the final norm do not run.

        Arguments are as in `forward`. Raises InputError for them, and for a model of one layer.
        """
        if self.config.num_hidden_layers < 2:
            raise InputError("penultimate_states: the model has one layer; give a text encoder with two or more")
        return self._run(input_ids, attention_mask, self._penultimate_state)[0]

    def _run(self, input_ids: Tensor, attention_mask: Tensor | None, encode: Encode) -> tuple[Tensor, ...]:
        """Run a method of this class on the tokens of each prompt. Return its results, (N, L, C) each."""
        places = self._places(input_ids, attention_mask)
        encode = self.graphed(encode.__name__, encode)
        results = []
        for ids, place in zip(input_ids.to(self.device), places, strict=True):
            tokens = ids[place][None]
            padded = F.pad(tokens, (0, -tokens.shape[1] % MULTIPLE))  # no token sees what comes after it
            states = next(iter(map_pictures(encode, padded)))
            around = (0, 0, place.start, len(ids) - place.stop)
            results.append([F.pad(each[:, : tokens.shape[1]], around) for each in states])
        return tuple(map(torch.cat, zip(*results, strict=True)))

    @torch.no_grad()
    def _last_state(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """(1, L) -> (1, L, C) after the final norm."""
        return (self.norm(self._states(input_ids, self.config.num_hidden_layers)[-1]),)

    @torch.no_grad()
    def _penultimate_state(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """(1, L) -> (1, L, C) after the last layer but one."""
        return (self._states(input_ids, self.config.num_hidden_layers - 1)[-1],)

    @torch.no_grad()
    def _all_states(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """(1, L) -> (1, L, C) after the final norm, and all hidden states."""
        *hidden, last = self._states(input_ids, self.config.num_hidden_layers)
        last = self.norm(last)
        return last, *hidden, last

    def _states(self, input_ids: Tensor, layers: int) -> list[Tensor]:
        """Return the embeddings and the outputs of the first `layers` layers, (1, L, C) each."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=torch.float64)
        angles = positions[:, None] * frequencies(self.config.head_dim, self.config.rope_theta, input_ids.device)
        cos, sin = angles.cos().float(), angles.sin().float()
        x, branch = self.embed_tokens(input_ids), None
        states = []
        for layer in cast("list[Qwen3DecoderLayer]", self.layers[:layers]):
            states.append(x if branch is None else x + branch)
            branch, x = layer(branch, x, cos, sin)
        return [*states, x if branch is None else x + branch]

    def _places(self, input_ids: Tensor, attention_mask: Tensor | None) -> list[slice]:
        """Return where the tokens of each prompt are. Raises InputError for arguments that do not fit."""
        tensor("input_ids", input_ids, INDICES)
        if input_ids.ndim != 2 or not input_ids.numel():
            raise InputError(f"input_ids: its shape is {tuple(input_ids.shape)}; it must be (N, L)")
        within("input_ids", input_ids, 0, self.config.vocab_size - 1)
        n, length = input_ids.shape
        if attention_mask is None:
            return [slice(0, length)] * n
        mask = tensor("attention_mask", attention_mask, MASKS)
        if mask.shape != input_ids.shape:
            raise InputError(f"attention_mask: its shape is {tuple(mask.shape)}; it must be {(n, length)}")
        places = []
        for row in mask.bool().tolist():
            if not any(row):
                raise InputError("attention_mask: a row is all padding; each prompt needs a token")
            place = slice(row.index(True), length - row[::-1].index(True))
            if not all(row[place]):
                raise InputError("attention_mask: a row has padding between tokens; put it before or after them")
            places.append(place)
        return places

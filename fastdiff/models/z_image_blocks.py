"""The blocks of a ZImageTransformer2DModel.

Tokens are (N, L, C). A block normalises them twice around attention and MLP: RMSNorm times a scale before, RMSNorm and
a gate after. The norm before the next layer computes the norm after and the gated sum too: one launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from fastdiff.checkpoints.configs.z_image import ZImageTransformer2DConfig
from fastdiff.kernels.attention import attention
from fastdiff.kernels.host.weights import FP8, Scaled
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.rotary import rotary
from fastdiff.kernels.swiglu import swiglu
from fastdiff.models.rms_norm import RMSNorm

HEAD_EPS = 1e-5  # of the norms of queries and keys; fixed in diffusers
LAST_EPS = 1e-6  # of the norm before the last layer; fixed in diffusers


class Attention(nn.Module):
    """Self-attention with a norm and a rotary embedding of queries and keys; diffusers' Attention as in Z-Image."""

    def __init__(self, config: ZImageTransformer2DConfig):
        super().__init__()
        self.heads = config.n_heads
        self.to_qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(config.dim, config.dim, bias=False)])
        self.norm_q, self.norm_k = (RMSNorm(config.head_dim, HEAD_EPS) if config.qk_norm else None for _ in "qk")

    def forward(self, x: Tensor | Scaled, cos: Tensor, sin: Tensor, lengths: Tensor | None = None) -> Tensor:
        qkv = linear(x, self.to_qkv.weight)  # (N, L, 3 C)
        width = qkv.shape[-1] // 3
        norms = None if self.norm_q is None or self.norm_k is None else (self.norm_q.weight, self.norm_k.weight)
        q, k = rotary(qkv[..., : 2 * width], cos, sin, norms, queries=self.heads, eps=HEAD_EPS).chunk(2, dim=-1)
        out = cast(nn.Linear, self.to_out[0])
        return linear(attention(q, k, qkv[..., 2 * width :], heads=self.heads, lengths=lengths), out.weight)


class FeedForward(nn.Module):
    """SwiGLU, then a projection; diffusers' class of this name, with its w1 and w3 as one layer."""

    def __init__(self, config: ZImageTransformer2DConfig):
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.mlp_dim, bias=False)
        self.w2 = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor | Scaled) -> Tensor:
        return linear(swiglu(x, self.w13.weight), self.w2.weight)


class Stream(NamedTuple):
    """The tokens between blocks: x + gate * norm(branch). The norm that reads them computes the sum."""

    x: Tensor  # (N, L, C)
    branch: Tensor | None = None  # (N, L, C)
    norm: RMSNorm | None = None  # of the branch; there if the branch is
    gate: Tensor | None = None  # (N, C); None: 1

    def normed(self, norm: RMSNorm, scale: Tensor | None, reader: nn.Linear) -> tuple[Tensor | Scaled, Tensor]:
        """Return the normalised and scaled sum, as the layer `reader` takes it, and the sum."""
        x, options = self._inputs()
        in_fp8 = reader.weight.dtype == FP8
        made = layer_norm(x, norm.weight, eps=norm.eps, rms=True, scale=scale, in_fp8=in_fp8, **options)
        return made if isinstance(made, tuple) else (made, self.x)

    def total(self) -> Tensor:
        """Return the sum."""
        if self.branch is None or self.norm is None:
            return self.x
        branch = self.norm(self.branch)
        return self.x + (branch if self.gate is None else branch * self.gate[:, None])

    def scaled(self, scale: Tensor) -> Tensor:
        """Return the sum after LayerNorm without parameters, times 1 + scale."""
        x, options = self._inputs()
        made = layer_norm(x, eps=LAST_EPS, scale=scale, **options)
        return made[0] if isinstance(made, tuple) else made  # type: ignore[return-value]

    def _inputs(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the x of `layer_norm`, and the options that make it the sum."""
        if self.branch is None or self.norm is None:
            return self.x, {}
        return self.branch, {
            "residual": self.x, "gate": self.gate, "branch_norm": (self.norm.weight, self.norm.eps),
        }  # fmt: skip

    def head(self, count: int) -> "Stream":
        """Return the first `count` tokens."""
        branch = None if self.branch is None else self.branch[:, :count]
        return self._replace(x=self.x[:, :count], branch=branch)


class ZImageTransformerBlock(nn.Module):
    """Attention and an MLP, each between two norms; diffusers' class of this name, without its modulation."""

    def __init__(self, config: ZImageTransformer2DConfig):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm1, self.ffn_norm1, self.attention_norm2, self.ffn_norm2 = (
            RMSNorm(config.dim, config.norm_eps) for _ in range(4)
        )

    def forward(
        self,
        stream: Stream,
        cos: Tensor,
        sin: Tensor,
        modulation: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Stream:
        """Return the tokens after this block.

        Args:
            modulation: (N, 4 C): scale and gate of the attention, then of the MLP. None for blocks of captions.
            lengths: (N,) int32: the tokens of each picture that are attended to. None for all.
        """
        scale, gate, scale_mlp, gate_mlp = (None,) * 4 if modulation is None else modulation.chunk(4, dim=1)
        h, x = stream.normed(self.attention_norm1, scale, self.attention.to_qkv)
        stream = Stream(x, self.attention(h, cos, sin, lengths), self.attention_norm2, gate)
        h, x = stream.normed(self.ffn_norm1, scale_mlp, self.feed_forward.w13)
        return Stream(x, self.feed_forward(h), self.ffn_norm2, gate_mlp)


def patched(x: Tensor, patch: tuple[int, int]) -> Tensor:
    """(N, F, H, W, C) -> (N, L, values): the patches row by row."""
    (n, f, h, w, c), (side, depth) = x.shape, patch
    cut = x.reshape(n, f // depth, depth, h // side, side, w // side, side, c)
    return cut.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(n, -1, depth * side * side * c)


def joined(patches: Tensor, shape: Sequence[int], patch: tuple[int, int]) -> Tensor:
    """(N, L, values) -> (N, F, H, W, C), which is `shape`: the inverse of `patched`."""
    (n, f, h, w, c), (side, depth) = shape, patch
    cut = patches.reshape(n, f // depth, h // side, w // side, depth, side, side, c)
    return cut.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(n, f, h, w, c)

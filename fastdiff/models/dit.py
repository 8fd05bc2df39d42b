"""DiTTransformer2DModel: the transformer denoiser of DiT (Peebles and Xie 2022, arXiv 2212.09748).

Tokens are (N, L, C), the patches of a picture row by row. A block is seven launches: norm, QKV, attention, projection;
norm, linear with activation, linear. A norm gates and adds the branch before it, and shifts and scales the result. The
shifts, scales and gates of all blocks depend on time and class only: they are columns of one table, made before the
sampling loop.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.dit import MLP_ACTIVATIONS, DiTTransformer2DConfig
from fastdiff.errors import InputError
from fastdiff.kernels.attention import attention
from fastdiff.kernels.host.weights import FP8, Quantised, Scaled
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.conditioning import Conditioning, in_groups
from fastdiff.models.blocks.embeddings import Timesteps
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import takes_options
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked

EPS = 1e-6  # of all norms but the one before the MLP, which has the config's; fixed in diffusers
TIME_WIDTH = 256  # of the sinusoidal embedding


@read_by_name
class Transformer2DModelOutput(NamedTuple):
    """The output of a DiTTransformer2DModel.

    `sample` is (N, C_out, H, W), the prediction. With C_out = 2 C_in its second half is the learned variance.
    """

    sample: Tensor


class PatchEmbed(nn.Module):
    """Embed patches as tokens, with 2-D sine and cosine positions; diffusers' PatchEmbed."""

    def __init__(self, config: DiTTransformer2DConfig):
        super().__init__()
        self.patch_size = config.patch_size
        self.base_side = config.sample_size // config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.inner_dim, config.patch_size, config.patch_size)
        self._positions: dict[tuple, Tensor] = {}  # never dropped: a CUDA graph may read them

    def forward(self, x: Tensor) -> Tensor:
        """(N, H, W, C_in) -> (N, L, C)."""
        n, height, _, channels = x.shape
        p, side = self.patch_size, height // self.patch_size
        patches = x.reshape(n, side, p, side, p, channels).transpose(2, 3).reshape(n, side**2, p * p * channels)
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)  # a view of channels-last memory
        return linear(patches, weight, self.proj.bias, residual=self._position(side).expand(n, -1, -1))

    def _position(self, side: int) -> Tensor:
        """Return (1, side^2, C) for side x side patches, scaled to the range of positions in training."""
        key = (side, self.proj.weight.dtype, self.proj.weight.device)
        if key not in self._positions:
            table = positions(side, self.base_side, self.proj.out_channels)
            self._positions[key] = table.to(self.proj.weight)[None]
        return self._positions[key]


def positions(side: int, base_side: int, channels: int) -> Tensor:
    """Return the position embedding (side^2, channels) of a square of patches, in float32.

    It is diffusers' get_2d_sincos_pos_embed. The first half of the channels encodes the column and the second half the
    row, each as sines, then cosines.
    """
    places = torch.arange(side, dtype=torch.float32) / (side / base_side)
    frequencies = 10_000 ** -(torch.arange(channels // 4, dtype=torch.float64) / (channels / 4))
    angles = torch.outer(places, frequencies)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1).float()  # (side, channels / 2)
    return torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, dim=0)], dim=1)


class CombinedTimestepLabelEmbeddings(nn.Module):
    """The sum of the time and class embeddings, for all blocks at once; diffusers' class of this name.

    In diffusers each block has its own module. Here their parameters are stacked along the outputs, so each layer is
    one product for all blocks.
    """

    def __init__(self, config: DiTTransformer2DConfig):
        super().__init__()
        blocks, channels, labels = config.num_layers, config.inner_dim, config.num_class_embeds
        self.blocks, self.labels = blocks, labels
        self.time_proj = Timesteps(TIME_WIDTH, flip_sin_to_cos=True, freq_shift=1)
        linear_1, linear_2 = nn.Linear(TIME_WIDTH, blocks * channels), nn.Linear(channels, blocks * channels)
        self.timestep_embedder = nn.ModuleDict({"linear_1": linear_1, "linear_2": linear_2})
        self.class_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(blocks * labels, channels)})

    def forward(self, timesteps: Tensor, class_labels: Tensor) -> Tensor:
        """(M,), (M,) int64 -> (blocks, M, C)."""
        linear_1, linear_2 = (cast(nn.Linear, layer) for layer in self.timestep_embedder.values())
        h = F.silu(linear_1(self.time_proj(timesteps).to(linear_1.weight.dtype)))
        h = stacked_linear(h.unflatten(1, (self.blocks, -1)).transpose(0, 1), linear_2)
        firsts = self.labels * torch.arange(self.blocks, device=class_labels.device)
        return h + self.class_embedder["embedding_table"](class_labels + firsts[:, None])


class AdaLayerNormZero(nn.Module):
    """The shifts, scales and gates of all blocks from time and class; diffusers' class of this name.

    The norm itself is part of the block.
    """

    def __init__(self, config: DiTTransformer2DConfig):
        super().__init__()
        self.emb = CombinedTimestepLabelEmbeddings(config)
        self.linear = nn.Linear(config.inner_dim, config.num_layers * 6 * config.inner_dim)

    def forward(self, timesteps: Tensor, class_labels: Tensor) -> tuple[Tensor, Tensor]:
        """(M,), (M,) int64 -> (blocks, M, 6 C), and the silu of the embeddings, (blocks, M, C)."""
        emb = F.silu(self.emb(timesteps, class_labels))
        return stacked_linear(emb, self.linear), emb


def stacked_linear(x: Tensor, layers: nn.Linear) -> Tensor:
    """Apply one of the stacked `layers` to each block's x: (blocks, M, C_in) -> (blocks, M, C_out)."""
    weight, bias = (tensor.unflatten(0, (len(x), -1)) for tensor in (layers.weight, layers.bias))
    if isinstance(weight, Quantised):
        return torch.cat([linear(*each) for each in zip(x.split(1), weight.unbind(), bias, strict=True)])
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


class Attention(nn.Module):
    """Self-attention; diffusers' Attention as in its BasicTransformerBlock."""

    def __init__(self, config: DiTTransformer2DConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.to_qkv = nn.Linear(config.inner_dim, 3 * config.inner_dim, bias=config.attention_bias)
        self.to_out = nn.ModuleList([nn.Linear(config.inner_dim, config.inner_dim)])

    def forward(self, x: Tensor | Scaled) -> Tensor:
        qkv = linear(x, self.to_qkv.weight, self.to_qkv.bias)  # (N, L, 3 C)
        h = attention(*qkv.chunk(3, dim=-1), heads=self.heads)
        out = cast(nn.Linear, self.to_out[0])
        return linear(h, out.weight, out.bias)


class FeedForward(nn.Module):
    """Linear, activation, linear; diffusers' FeedForward."""

    def __init__(self, config: DiTTransformer2DConfig):
        super().__init__()
        self.activation = MLP_ACTIVATIONS[config.activation_fn]
        inner = nn.Linear(config.inner_dim, 4 * config.inner_dim)
        outer = nn.Linear(4 * config.inner_dim, config.inner_dim)
        self.net = nn.ModuleDict({"0": nn.ModuleDict({"proj": inner}), "2": outer})

    @property
    def reader(self) -> nn.Linear:
        return cast(nn.Linear, cast(nn.ModuleDict, self.net["0"])["proj"])

    def forward(self, x: Tensor | Scaled) -> Tensor:
        outer = cast(nn.Linear, self.net["2"])
        h = linear(x, self.reader.weight, self.reader.bias, activation=self.activation)
        return linear(h, outer.weight, outer.bias)


class Stream(NamedTuple):
    """The tokens between blocks: x + gate * branch. The norm that reads them computes the sum."""

    x: Tensor  # (N, L, C)
    branch: Tensor | None = None  # (N, L, C)
    gate: Tensor | None = None  # (N, C)

    def normed(
        self, scale: Tensor, shift: Tensor, norm: nn.LayerNorm | None = None, *, reader: nn.Linear
    ) -> tuple[Tensor | Scaled, Tensor]:
        """Return the normalised and modulated sum, as the layer `reader` takes it, and the sum."""
        weight, bias, eps = (None, None, EPS) if norm is None else (norm.weight, norm.bias, norm.eps)
        x, residual = (self.x, None) if self.branch is None else (self.branch, self.x)
        normed = layer_norm(
            x, weight, bias, residual=residual, gate=self.gate, eps=eps, scale=scale, shift=shift,
            in_fp8=reader.weight.dtype == FP8,
        )  # fmt: skip
        return normed if isinstance(normed, tuple) else (normed, self.x)


class BasicTransformerBlock(nn.Module):
    """Modulated attention and MLP; diffusers' BasicTransformerBlock with ada_norm_zero, without its norm1."""

    def __init__(self, config: DiTTransformer2DConfig):
        super().__init__()
        self.attn1 = Attention(config)
        self.norm3 = nn.LayerNorm(config.inner_dim, config.norm_eps, config.norm_elementwise_affine)
        self.ff = FeedForward(config)

    def forward(self, stream: Stream, modulation: Tensor) -> Stream:
        """modulation: (N, 6 C)."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=1)
        h, x = stream.normed(scale, shift, reader=self.attn1.to_qkv)
        h, x = Stream(x, self.attn1(h), gate).normed(scale_mlp, shift_mlp, self.norm3, reader=self.ff.reader)
        return Stream(x, self.ff(h), gate_mlp)


class DiTTransformer2DModel(Denoiser):
    """The transformer denoiser of DiT (Peebles and Xie 2022, arXiv 2212.09748), conditioned on time and class.

    It takes the config, weights and call of diffusers' DiTTransformer2DModel, for inference only. See Model for how to
    build it. ::

        model = DiTTransformer2DModel.from_pretrained("emoji64-dit", device="cuda", dtype=torch.bfloat16)
        prediction = model(sample, timestep, class_labels).sample
    """

    config: DiTTransformer2DConfig
    whole = ("pos_embed.", "norm1.emb.", "proj_out_1.", "proj_out_2.")
    part = registry.TRANSFORMER

    @takes_options
    def __init__(self, config: DiTTransformer2DConfig):
        super().__init__(config)
        blocks, channels = config.num_layers, config.inner_dim
        self.pos_embed = PatchEmbed(config)
        self.norm1 = AdaLayerNormZero(config)
        self.transformer_blocks = nn.ModuleList(BasicTransformerBlock(config) for _ in range(blocks))
        self.proj_out_1 = nn.Linear(channels, 2 * channels)
        self.proj_out_2 = nn.Linear(channels, config.patch_size**2 * config.prediction_channels)

        self.stacked = {"norm1.": {f"transformer_blocks.{i}.norm1.": 1 for i in range(blocks)}}
        self._columns = [6 * channels] * blocks + [2 * channels]
        self.conditioning_width = sum(self._columns)
        self._lay_out()

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | float,
        class_labels: Tensor | None = None,
        cross_attention_kwargs: None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict at one timestep. Arguments and output match diffusers' model.

        Args:
            hidden_states: (N, C_in, H, H) in the model's dtype, on its device. H is a multiple of patch_size.
            timestep: a number, or a tensor of one or N timesteps. A number is truncated to an integer.
            class_labels: (N,) int64, or one for all. `config.num_embeds_ada_norm` is the null label.
            cross_attention_kwargs: not supported: it must be None or empty.
            return_dict: whether to return a Transformer2DModelOutput instead of a tuple.

        Returns:
            Transformer2DModelOutput whose `sample` is (N, C_out, H, H), or a tuple of it.

        Raises:
            InputError: for an argument that the model does not take.
        """
        if not isinstance(cross_attention_kwargs, dict | None) or cross_attention_kwargs:
            raise InputError("cross_attention_kwargs: attention processors are not supported; leave them out")
        checked("return_dict", return_dict, bool)
        prediction = self._run(hidden_states, timestep, class_labels)
        return Transformer2DModelOutput(prediction) if return_dict else (prediction,)

    @torch.no_grad()
    def conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        self._check_labels(len(timesteps), class_labels)
        assert class_labels is not None
        groups = zip(in_groups(timesteps), in_groups(class_labels.expand(len(timesteps))), strict=True)
        return Conditioning(torch.cat([self._modulate(*group) for group in groups])[: len(timesteps)], timesteps)

    def _modulate(self, timesteps: Tensor, class_labels: Tensor) -> Tensor:
        """(M,), (M,) -> (M, conditioning_width): the columns of each block, then those of the last norm."""
        modulations, emb = self.norm1(timesteps, class_labels)
        return torch.cat([*modulations, self.proj_out_1(emb[0])], dim=1)  # block 0 embeds for the last norm too

    @torch.no_grad()
    def predict(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        *modulations, last = conditioning.temb.expand(len(x), -1).split(self._columns, dim=1)
        stream = Stream(self.pos_embed(x))
        for block, modulation in zip(self.transformer_blocks, modulations, strict=True):
            stream = block(stream, modulation)

        shift, scale = last.chunk(2, dim=1)
        tokens, _ = stream.normed(scale, shift, reader=self.proj_out_2)
        patches = linear(tokens, self.proj_out_2.weight, self.proj_out_2.bias)
        side, p = x.shape[1] // self.config.patch_size, self.config.patch_size
        return patches.reshape(len(x), side, side, p, p, -1).transpose(2, 3).reshape(*x.shape[:3], -1)

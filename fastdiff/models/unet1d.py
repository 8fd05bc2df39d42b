"""UNet1DModel: the planner of Janner et al. 2022 (arXiv 2205.09991), and its value function.

Trajectories are pictures of height 1, (N, 1, L, C), and a filter of 5 taps is a 1 x 5 filter. A convolution with its
GroupNorm, Mish, time embedding and residual is one call of `kernels.conv2d`.
"""

from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.unet1d import GROUPS, UNet1DConfig
from fastdiff.checkpoints.weights import Conversion
from fastdiff.kernels.conv2d import Norm, conv2d
from fastdiff.models.blocks.conditioning import Conditioning
from fastdiff.models.blocks.embeddings import GaussianFourierProjection, TimestepEmbedding, Timesteps, each_through
from fastdiff.models.blocks.layers import ACTIVATIONS, GroupNorm, as_feature
from fastdiff.models.blocks.resnet import Conditioned
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import takes_options
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked

TAPS = 5  # of the filters in residual and out blocks
TensorOrPair = Tensor | tuple[Tensor, Tensor]  # (N, 1, L, C); a pair: an input and its skip connection


@read_by_name
class UNet1DOutput(NamedTuple):
    """The output of a UNet1DModel.

    `sample` is (N, C_out, L), the prediction: noise, sample or velocity, according to the scheduler's config. For a
    value function it is (N, 1), the values.
    """

    sample: Tensor


class Conv1d(nn.Conv1d):
    """torch's Conv1d over (N, 1, L, C), zero-padded."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2)

    def forward(self, x: TensorOrPair, norm: Norm | None = None) -> Tensor:
        """Convolve, then apply `norm` with everything that it adds."""
        sides = self.kernel_size[0] // 2
        padding, stride = (sides, sides, 0, 0) if sides else 0, self.stride[0]
        weight = self.weight.unflatten(1, (-1, 1))
        return as_feature(conv2d(x, weight, self.bias, padding=padding, stride=stride, norm=norm)).x


class Conv1dBlock(nn.Module):
    """Convolution, GroupNorm, Mish; diffusers' Conv1dBlock."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1d = Conv1d(in_channels, out_channels, TAPS)
        self.group_norm = GroupNorm(GROUPS, out_channels)

    def forward(self, x: TensorOrPair, **added: Tensor) -> Tensor:
        """Run the block. `added` to its output are `temb` (N, C_out) and `residual` (N, 1, L, C_out)."""
        return self.conv1d(x, self.group_norm.after(activation="mish", **added))


class ResidualTemporalBlock1D(Conditioned):
    """Two convolutions with the time embedding added in between, and a residual; diffusers' class of this name."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv_in = Conv1dBlock(in_channels, out_channels)
        self.conv_out = Conv1dBlock(out_channels, out_channels)
        self.projections = {"time_emb": out_channels}
        self.residual_conv = Conv1d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: TensorOrPair, temb: Tensor) -> Tensor:
        h = self.conv_in(x, temb=temb[:, self.columns])
        return self.conv_out(h, residual=_joined(x) if self.residual_conv is None else self.residual_conv(x))


def _joined(x: TensorOrPair) -> Tensor:
    return x if isinstance(x, Tensor) else torch.cat(x, dim=-1)


class Downsample1D(nn.Module):
    """A convolution of 3 taps and stride 2; diffusers' Downsample1D."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv1d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Upsample1D(nn.Module):
    """A transposed convolution of 4 taps, stride 2 and padding 1; diffusers' Upsample1D.

    With taps w, it computes y[2i] = w[3] x[i-1] + w[1] x[i] and y[2i+1] = w[2] x[i] + w[0] x[i+1]. Here both are
    outputs at position i of `conv`, a plain convolution of 3 taps. `conversions` make its parameters from diffusers'.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv1d(channels, 2 * channels, 3)
        self.conversions = {
            "conv.weight": Conversion((channels, channels, 4), plain_weight, transposed_weight),
            "conv.bias": Conversion((channels,), plain_bias, transposed_bias),
        }

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, L, C) -> (N, 1, 2 L, C)."""
        return self.conv(x).unflatten(3, (2, -1)).flatten(2, 3)


def plain_weight(transposed: Tensor) -> Tensor:
    """(C_in, C_out, 4) -> (2 C_out, C_in, 3): the filters of even positions, then the filters of odd positions."""
    taps = F.pad(transposed.transpose(0, 1), (1, 1)).flip(2)  # 0, w[3], w[2], w[1], w[0], 0
    return torch.cat([taps[:, :, 1::2], taps[:, :, ::2]])


def plain_bias(transposed: Tensor) -> Tensor:
    """(C_out,) -> (2 C_out,)."""
    return transposed.repeat(2)


def transposed_weight(plain: Tensor) -> Tensor:
    """(2 C_out, C_in, 3) -> (C_in, C_out, 4), the inverse of `plain_weight`."""
    even, odd = plain.chunk(2)  # w[3], w[1], 0 and 0, w[2], w[0]
    return torch.stack([odd[:, :, 2], even[:, :, 1], odd[:, :, 1], even[:, :, 0]], dim=2).transpose(0, 1)


def transposed_bias(plain: Tensor) -> Tensor:
    """(2 C_out,) -> (C_out,), the inverse of `plain_bias`."""
    return plain.chunk(2)[0]


class Stage1D(nn.Module):
    """Residual blocks at one resolution."""

    def __init__(self, in_channels: int, out_channels: int, layers: int):
        super().__init__()
        first = ResidualTemporalBlock1D(in_channels, out_channels)
        rest = [ResidualTemporalBlock1D(out_channels, out_channels) for _ in range(layers)]
        self.resnets = nn.ModuleList([first, *rest])

    def forward(self, x: TensorOrPair, temb: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x, temb)
        return _joined(x)


class DownResnetBlock1D(Stage1D):
    """A stage that halves the horizon at its end; diffusers' DownResnetBlock1D."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, *, downsample: bool):
        super().__init__(in_channels, out_channels, layers)
        self.downsample = Downsample1D(out_channels) if downsample else None

    def forward(self, x: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the output and the skip connection."""
        skip = super().forward(x, temb)
        return skip if self.downsample is None else self.downsample(skip), skip


class UpResnetBlock1D(Stage1D):
    """A stage that reads a skip connection and doubles the horizon at its end; diffusers' UpResnetBlock1D."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, *, upsample: bool):
        super().__init__(2 * in_channels, out_channels, layers)
        self.upsample = Upsample1D(out_channels) if upsample else None

    def forward(self, x: TensorOrPair, temb: Tensor) -> Tensor:
        x = super().forward(x, temb)
        return x if self.upsample is None else self.upsample(x)


class ValueFunctionMidBlock1D(nn.Module):
    """Halve the channels and the horizon twice; diffusers' ValueFunctionMidBlock1D."""

    def __init__(self, channels: int):
        super().__init__()
        self.res1 = ResidualTemporalBlock1D(channels, channels // 2)
        self.down1 = Downsample1D(channels // 2)
        self.res2 = ResidualTemporalBlock1D(channels // 2, channels // 4)
        self.down2 = Downsample1D(channels // 4)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        x = self.down1(self.res1(x, temb))
        return self.down2(self.res2(x, temb))


class OutConv1DBlock(nn.Module):
    """Convolution, GroupNorm, activation, and a convolution of 1 tap; diffusers' OutConv1DBlock."""

    def __init__(self, config: UNet1DConfig):
        super().__init__()
        width = config.block_out_channels[0]
        self.activation = config.activation
        self.final_conv1d_1 = Conv1d(width, width, TAPS)
        self.final_conv1d_gn = GroupNorm(config.out_groups, width)
        self.final_conv1d_2 = Conv1d(width, config.out_channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.final_conv1d_2(self.final_conv1d_1(x, self.final_conv1d_gn.after(activation=self.activation)))


class OutValueFunctionBlock(nn.Module):
    """Two linear layers over the only position and the time embedding; diffusers' OutValueFunctionBlock."""

    def __init__(self, config: UNet1DConfig):
        super().__init__()
        width = config.block_out_channels[-1] // 4
        self.activation = config.activation
        layers = {"0": (width + config.block_out_channels[0], width // 2), "2": (width // 2, 1)}
        self.final_block = nn.ModuleDict({place: nn.Linear(*sizes) for place, sizes in layers.items()})

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x (N, 1, 1, C) and time (N, width) -> (N, 1, 1, 1)."""
        first, last = (cast(nn.Linear, layer) for layer in self.final_block.values())
        h = each_through(torch.cat([x.flatten(1), time], dim=1), first)
        return each_through(ACTIVATIONS[self.activation](h), last)[:, None, None]


class UNet1DModel(Denoiser):
    """The planner of Janner et al. 2022 (arXiv 2205.09991): a policy that denoises trajectories, or a value function.

    It takes the config, weights and call of diffusers' UNet1DModel, for inference only. Models with diffusers' audio
    blocks are not supported. See Model for how to build it. ::

        model = UNet1DModel.from_pretrained("path/to/folder", subfolder="unet", device="cuda")
        prediction = model(trajectories, timestep).sample
    """

    config: UNet1DConfig
    whole = ("time_mlp.", "down_blocks.0.resnets.0.", "out_block.")
    part = registry.UNET_1D

    @takes_options
    def __init__(self, config: UNet1DConfig):
        super().__init__(config)
        first, last = config.block_out_channels[0], config.block_out_channels[-1]
        self.time_proj = _time_projection(config)
        self.time_mlp = TimestepEmbedding(config.time_width, 4 * first, first, config.activation)
        self.down_blocks = nn.ModuleList(_down_stages(config))
        self.mid_block = (
            ValueFunctionMidBlock1D(last)
            if config.is_value_function
            else Stage1D(last, last, config.layers_per_block)  # diffusers' MidResTemporalBlock1D
        )
        self.up_blocks = nn.ModuleList(_up_stages(config))
        self.out_block = _out_block(config)
        self.conversions = {
            f"{path}.{name}": conversion
            for path, module in self.named_modules()
            if isinstance(module, Upsample1D)
            for name, conversion in module.conversions.items()
        }
        self.time_emb = cast(nn.Linear, self._stack_projections("time_emb.", first))
        self._lay_out()

    def forward(
        self, sample: Tensor, timestep: Tensor | float, return_dict: bool = True
    ) -> UNet1DOutput | tuple[Tensor]:
        """Predict at one timestep. Arguments and output match diffusers' model.

        Args:
            sample: (N, C_in, L) in the model's dtype, on its device. For a policy, L is a multiple of
                `config.size_factor`. For a value function, L is at most `config.most_horizon`.
            timestep: a number, or a tensor of one or N timesteps. A number is truncated to an integer, as in diffusers.
            return_dict: whether to return a UNet1DOutput instead of a tuple.

        Returns:
            UNet1DOutput whose `sample` is (N, C_out, L), or (N, 1) for a value function; or a tuple of it.

        Raises:
            InputError: for an argument that the model does not take.
        """
        checked("return_dict", return_dict, bool)
        prediction = self._run(sample, timestep)
        return UNet1DOutput(prediction) if return_dict else (prediction,)

    @torch.no_grad()
    def conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        self._check_labels(len(timesteps), class_labels)
        emb = self.time_mlp(self.time_proj(timesteps).to(self.dtype))
        columns = each_through(F.mish(emb), self.time_emb)
        # the last layers of a value function read the embedding itself
        return Conditioning(torch.cat([columns, emb], dim=1) if self.config.is_value_function else columns, timesteps)

    @torch.no_grad()
    def predict(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """(N, 1, L, C_in) -> (N, 1, L, C_out), or (N, 1, 1, 1) for a value function."""
        temb = conditioning.temb.expand(len(x), -1)
        skips = []
        for block in self.down_blocks:
            x, skip = block(x, temb)
            skips.append(skip)

        x = self.mid_block(x, temb)

        for block in self.up_blocks:
            x = block((x, skips.pop()), temb)

        return x if self.out_block is None else self.out_block(x, temb[:, self.time_emb.out_features :])

    def channels_last(self, sample: Tensor) -> Tensor:
        """Return a view (N, 1, L, C) of a sample in diffusers' layout (N, C, L)."""
        return sample.permute(0, 2, 1)[:, None]

    def channels_first(self, prediction: Tensor) -> Tensor:
        """Return a view of the output of `predict` in diffusers' layout: (N, C_out, L), or the values (N, 1)."""
        return prediction[:, 0, 0] if self.config.is_value_function else prediction[:, 0].permute(0, 2, 1)


def _time_projection(config: UNet1DConfig) -> nn.Module:
    """Return the module that embeds a timestep."""
    if config.time_embedding_type == "fourier":
        return GaussianFourierProjection(
            config.time_width // 2, scale=1.0, log=False, flip_sin_to_cos=config.flip_sin_to_cos
        )
    return Timesteps(config.time_width, config.flip_sin_to_cos, float(config.freq_shift))


def _down_stages(config: UNet1DConfig) -> list[DownResnetBlock1D]:
    widths = (config.sample_channels, *config.block_out_channels)
    return [
        DownResnetBlock1D(before, out, config.layers_per_block, downsample=i < config.halvings)
        for i, (before, out) in enumerate(pairwise(widths))
    ]


def _up_stages(config: UNet1DConfig) -> list[UpResnetBlock1D]:
    count, widths = len(config.up_block_types), config.block_out_channels[::-1]
    return [
        UpResnetBlock1D(before, out, config.layers_per_block, upsample=i < config.halvings)
        for i, (before, out) in enumerate(pairwise((*widths[:count], config.last_width)))
    ]


def _out_block(config: UNet1DConfig) -> nn.Module | None:
    if config.is_value_function:
        return OutValueFunctionBlock(config)
    return None if config.out_block_type is None else OutConv1DBlock(config)

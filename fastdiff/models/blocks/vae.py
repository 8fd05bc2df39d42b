"""The encoder and decoder of a VAE, with their stages; diffusers' Encoder and Decoder."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import nn

from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.models.blocks.attention import Attention
from fastdiff.models.blocks.layers import Conv2d, Feature, GroupNorm
from fastdiff.models.blocks.resampling import Downsample2D, Upsample2D
from fastdiff.models.blocks.resnet import BlockOptions, ResnetBlock2D
from fastdiff.models.blocks.stages import MidBlock2D, Stage

EPS = 1e-6  # of all norms


class PlainStage(Stage):
    """Residual blocks without time or skip connections, each followed by an attention if the stage has attention."""

    def __init__(self, widths: Sequence[int], options: BlockOptions, *, attention: bool):
        resnets = [ResnetBlock2D(i, o, options) for i, o in pairwise(widths)]
        out, groups = widths[-1], options.num_groups
        super().__init__(resnets, [Attention(out, out, groups, EPS, 1.0) for _ in resnets if attention])

    def layers(self, x: Feature) -> Feature:
        for i in range(len(self.resnets)):
            x = self.layer(i, x)
        return x


class DownEncoderBlock2D(PlainStage):
    """diffusers' DownEncoderBlock2D; AttnDownEncoderBlock2D with attention."""

    def __init__(self, widths: Sequence[int], options: BlockOptions, *, attention: bool, resample: bool):
        super().__init__(widths, options, attention=attention)
        downsampler = [Downsample2D(widths[-1], options.downsample_padding)]
        self.downsamplers = nn.ModuleList(downsampler) if resample else None

    def forward(self, x: Feature) -> Feature:
        x = self.layers(x)
        return x if self.downsamplers is None else self.downsamplers[0](x)


class UpDecoderBlock2D(PlainStage):
    """diffusers' UpDecoderBlock2D; AttnUpDecoderBlock2D with attention."""

    def __init__(self, widths: Sequence[int], options: BlockOptions, *, attention: bool, resample: bool):
        super().__init__(widths, options, attention=attention)
        self.upsamplers = nn.ModuleList([Upsample2D(widths[-1])]) if resample else None

    def forward(self, x: Feature) -> Feature:
        x = self.layers(x)
        return x if self.upsamplers is None else self.upsamplers[0](x)


class Encoder(nn.Module):
    """Pictures (N, H, W, C) -> mean and log variance of their latents (N, H / scale, W / scale, 2 C)."""

    def __init__(self, config: AutoencoderKLConfig):
        super().__init__()
        options, widths = _options(config), config.block_out_channels
        self.conv_in = Conv2d(config.in_channels, widths[0], 3)
        stages = zip(config.down_kinds, pairwise((widths[0], *widths)), strict=True)
        self.down_blocks = nn.ModuleList(
            DownEncoderBlock2D(
                [before] + [out] * config.layers_per_block,
                options,
                attention=kind.startswith("Attn"),
                resample=i < len(widths) - 1,
            )
            for i, (kind, (before, out)) in enumerate(stages)
        )
        self.mid_block = _mid_block(config, options)
        self.conv_norm_out = GroupNorm(config.norm_num_groups, widths[-1], eps=EPS)
        self.conv_out = Conv2d(widths[-1], 2 * config.latent_channels, 3)

    def forward(self, x: Feature) -> Feature:
        x = self.mid_block(_through(self.down_blocks, self.conv_in(x)))
        return self.conv_out(self.conv_norm_out(x, activation="silu"), moments=False)


class Decoder(nn.Module):
    """Latents (N, h, w, C) -> pictures (N, scale * h, scale * w, C)."""

    def __init__(self, config: AutoencoderKLConfig):
        super().__init__()
        options, widths = _options(config), config.block_out_channels[::-1]
        self.conv_in = Conv2d(config.latent_channels, widths[0], 3)
        self.mid_block = _mid_block(config, options)
        stages = zip(config.up_kinds, pairwise((widths[0], *widths)), strict=True)
        self.up_blocks = nn.ModuleList(
            UpDecoderBlock2D(
                [before] + [out] * (config.layers_per_block + 1),
                options,
                attention=kind.startswith("Attn"),
                resample=i < len(widths) - 1,
            )
            for i, (kind, (before, out)) in enumerate(stages)
        )
        self.conv_norm_out = GroupNorm(config.norm_num_groups, widths[-1], eps=EPS)
        self.conv_out = Conv2d(widths[-1], config.out_channels, 3)

    def forward(self, x: Feature) -> Feature:
        x = _through(self.up_blocks, self.mid_block(self.conv_in(x)))
        return self.conv_out(self.conv_norm_out(x, activation="silu"), moments=False)


def _through(blocks: Iterable[nn.Module], x: Feature) -> Feature:
    for block in blocks:
        x = block(x)
    return x


def _options(config: AutoencoderKLConfig) -> BlockOptions:
    return BlockOptions(
        temb_channels=0,
        eps=EPS,
        activation=config.activation,
        scale_shift=False,
        num_groups=config.norm_num_groups,
        head_dim=None,
        downsample_padding=0,
    )


def _mid_block(config: AutoencoderKLConfig, options: BlockOptions) -> MidBlock2D:
    return MidBlock2D(
        config.block_out_channels[-1],
        options,
        attention_groups=None,
        add_attention=config.mid_block_add_attention,
        scale=1.0,
    )

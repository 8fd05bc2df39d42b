"""The stages of a text U-Net: down, mid and up blocks of residual blocks and attentions, with diffusers' names."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from fastdiff.checkpoints.configs.unet2d_condition_stages import StagePlan
from fastdiff.models.blocks.layers import Feature, FeatureOrPair, plus
from fastdiff.models.blocks.resampling import Downsample2D, Upsample2D, average_down, fir_down, fir_up, nearest_up
from fastdiff.models.blocks.resnet import BlockOptions, Conditioned, Resample, ResnetBlock2D
from fastdiff.models.blocks.stages import K_GROUP_SIZE, k_resnet
from fastdiff.models.blocks.text_attentions import AddedAttention, KAttention, PlainAttention
from fastdiff.models.blocks.transformer import Context, Transformer2DModel


class TextBlockOptions(NamedTuple):
    """Options that all blocks of one model share."""

    resnets: BlockOptions
    linear_projection: bool
    text_width: int
    cross_norm: str | None  # of the text, in SimpleCrossAttn blocks
    raw_temb: bool  # whether Resnet and SimpleCrossAttn blocks read the time embedding without an activation
    output_scale: float  # of residual blocks in Resnet and SimpleCrossAttn blocks

    def resnet(
        self, plan: StagePlan, before: int, *, scale: float | None = None, resample: Resample | None = None
    ) -> ResnetBlock2D:
        """Return a residual block of a stage, for an input of `before` channels."""
        options, of_plan = self.resnets, 1.0
        if plan.block.resample == "resnet":
            options, of_plan = replace(options, raw=self.raw_temb), self.output_scale
        scale = of_plan if scale is None else scale
        return ResnetBlock2D(before, plan.width, options, output_scale=scale, resample=resample)

    def attentions(self, plan: StagePlan, widths: Sequence[int]) -> list[nn.Module]:
        """Return the attentions of a stage, one for each width; none if its block has none."""
        kind, groups, eps = plan.block.attention, self.resnets.groups[0], self.resnets.eps
        if kind == "transformer":
            return [self._transformer(plan, depth) for depth in plan.depths]
        if kind == "plain":
            return [PlainAttention(width, plan.head_dim, groups, eps, 1.0) for width in widths]
        if kind == "added":
            make = partial(AddedAttention, only_cross=plan.only_cross, cross_norm=self.cross_norm)
            return [make(width, plan.head_dim, self.text_width, groups) for width in widths]
        return []

    def _transformer(self, plan: StagePlan, depth: int) -> Transformer2DModel:
        return Transformer2DModel(
            plan.width,
            plan.inner,
            plan.heads,
            depth,
            groups=self.resnets.groups[0],
            linear_projection=self.linear_projection,
            only_cross=plan.only_cross,
        )


class TextStage(nn.Module):
    """Residual blocks at one resolution, each followed by an attention if the stage has any."""

    def __init__(self, resnets: Sequence[Conditioned], attentions: Sequence[nn.Module]):
        super().__init__()
        self.attentions = nn.ModuleList(attentions) if attentions else None
        self.resnets = nn.ModuleList(resnets)

    def layer(self, i: int, x: FeatureOrPair, context: Context) -> Feature:
        h: Feature = self.resnets[i](x, context.temb)
        return self.attentions[i](h, context) if self.attentions is not None else h


class TextDownBlock2D(TextStage):
    """diffusers' CrossAttnDownBlock2D, DownBlock2D, AttnDownBlock2D, SimpleCrossAttnDownBlock2D, or
    ResnetDownsampleBlock2D, as the plan says.
    """

    def __init__(self, plan: StagePlan, before: int, options: TextBlockOptions, *, downsample: bool):
        widths = [before] + [plan.width] * (plan.layers - 1)
        attentions = options.attentions(plan, [plan.width] * plan.layers)
        super().__init__([options.resnet(plan, width) for width in widths], attentions)
        self.downsamplers = nn.ModuleList([_downsampler(plan, options)]) if downsample else None
        self.reads_text = plan.block.reads_text

    def forward(self, x: Feature, context: Context, added: Tensor | None = None) -> tuple[Feature, list[Feature]]:
        """Return the output, and the outputs of all layers as skip connections.

        added: of a T2I-Adapter, (N, H, W, C), added to the last layer's output. In a block that reads no text it is
        added to the block's output, as in diffusers.
        """
        skips = []
        for i in range(len(self.resnets)):
            x = self.layer(i, x, context)
            if added is not None and self.reads_text and i == len(self.resnets) - 1:
                x = plus(x, added)
            skips.append(x)
        if self.downsamplers is not None:
            sampler = self.downsamplers[0]
            x = sampler(x, context.temb) if isinstance(sampler, Conditioned) else sampler(x)
            skips.append(x)
        if added is not None and not self.reads_text:
            x = skips[-1] = plus(x, added)
        return x, skips


class TextUpBlock2D(TextStage):
    """diffusers' CrossAttnUpBlock2D, UpBlock2D, AttnUpBlock2D, SimpleCrossAttnUpBlock2D, or ResnetUpsampleBlock2D, as
    the plan says.
    """

    def __init__(self, plan: StagePlan, before: int, above: int, options: TextBlockOptions, *, upsample: bool):
        more = plan.layers - 1
        inputs = zip([before] + [plan.width] * more, [plan.width] * more + [above], strict=True)  # and skip connections
        attentions = options.attentions(plan, [plan.width] * plan.layers)
        super().__init__([options.resnet(plan, x + skip) for x, skip in inputs], attentions)
        self.upsamplers = nn.ModuleList([_upsampler(plan, options)]) if upsample else None

    def forward(self, x: Feature, skips: list[Feature], context: Context) -> Feature:
        """Run the stage. It pops its skip connections from `skips`; the output has the size of the next one."""
        for i in range(len(self.resnets)):
            x = self.layer(i, (x, skips.pop()), context)
        if self.upsamplers is None:
            return x
        sampler = self.upsamplers[0]
        if isinstance(sampler, Conditioned):
            return sampler(x, context.temb)
        height, width = skips[-1].x.shape[1:3]
        return sampler(x, (height, width))


class TextMidBlock2D(TextStage):
    """diffusers' UNetMidBlock2DCrossAttn or UNetMidBlock2DSimpleCrossAttn; UNetMidBlock2D, one residual block."""

    def __init__(self, plan: StagePlan, options: TextBlockOptions, *, scale: float):
        attentions = options.attentions(plan, [plan.width])
        super().__init__(
            [options.resnet(plan, plan.width, scale=scale) for _ in range(1 + len(attentions))], attentions
        )

    def forward(self, x: Feature, context: Context) -> Feature:
        x = self.layer(0, x, context)
        return self.resnets[1](x, context.temb) if self.attentions is not None else x


class KTextDownBlock2D(TextStage):
    """diffusers' KDownBlock2D; KCrossAttnDownBlock2D with attention."""

    def __init__(self, plan: StagePlan, before: int, options: TextBlockOptions, *, downsample: bool):
        out, layers = plan.width, plan.layers
        widths = [before] + [out] * (layers - 1)
        super().__init__(
            [k_resnet(width, out, out, options.resnets) for width in widths],
            _k_attentions(plan, [out] * layers, options),
        )
        self.downsample = downsample

    def forward(self, x: Feature, context: Context) -> tuple[Feature, list[Feature]]:
        """Return the output, and the output of the last layer as the skip connection of the stage."""
        for i in range(len(self.resnets)):
            x = self.layer(i, x, context)
        skips = [x] if self.downsample or self.attentions is None else []
        return (fir_down(x, "reflect") if self.downsample else x), skips


class KTextUpBlock2D(TextStage):
    """diffusers' KUpBlock2D; KCrossAttnUpBlock2D with attention. Its last layer has the width of the next stage."""

    def __init__(self, plan: StagePlan, above: int, options: TextBlockOptions, *, reads_skip: bool, upsample: bool):
        out, layers = plan.width, plan.layers
        widths = [(2 if reads_skip else 1) * out] + [out] * (layers - 1)
        outs = [out] * (layers - 1) + [above]
        if plan.block.attention is None:
            resnets = [k_resnet(i, o, out, options.resnets) for i, o in zip(widths, outs, strict=True)]
        else:
            resnets = [k_resnet(i, out, out, options.resnets, last=o) for i, o in zip(widths, outs, strict=True)]
        super().__init__(resnets, _k_attentions(plan, outs, options))
        self.reads_skip, self.upsample = reads_skip, upsample

    def forward(self, x: Feature, skips: list[Feature], context: Context) -> Feature:
        """Run the stage. It pops its skip connection from `skips`."""
        skip = skips.pop() if self.reads_skip else None
        for i in range(len(self.resnets)):
            x = self.layer(i, x if i or skip is None else (x, skip), context)
        return fir_up(x, "reflect") if self.upsample else x


def _k_attentions(plan: StagePlan, widths: Sequence[int], options: TextBlockOptions) -> list[nn.Module]:
    if plan.block.attention is None:
        return []
    return [
        KAttention(
            width, plan.head_dim, options.text_width, K_GROUP_SIZE, options.resnets, of_pixels=plan.self_attention
        )
        for width in widths
    ]


def _downsampler(plan: StagePlan, options: TextBlockOptions) -> nn.Module:
    if plan.block.resample == "resnet":
        return options.resnet(plan, plan.width, resample=average_down)
    return Downsample2D(plan.width, options.resnets.downsample_padding)


def _upsampler(plan: StagePlan, options: TextBlockOptions) -> nn.Module:
    if plan.block.resample == "resnet":
        return options.resnet(plan, plan.width, resample=nearest_up)
    return Upsample2D(plan.width)

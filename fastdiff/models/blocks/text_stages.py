"""The stages of a text U-Net: down, mid and up blocks of residual blocks and transformers, with diffusers' names."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from fastdiff.checkpoints.configs.unet2d_condition import StagePlan
from fastdiff.models.blocks.layers import Feature, FeatureOrPair
from fastdiff.models.blocks.resampling import Downsample2D, Upsample2D
from fastdiff.models.blocks.resnet import BlockOptions, ResnetBlock2D
from fastdiff.models.blocks.transformer import Context, Transformer2DModel


class TextBlockOptions(NamedTuple):
    """Options that all blocks of one model share."""

    resnets: BlockOptions
    groups: int
    linear_projection: bool


class TextStage(nn.Module):
    """Residual blocks at one resolution, each followed by a transformer if the plan has any."""

    def __init__(self, plan: StagePlan, resnets: Sequence[ResnetBlock2D], options: TextBlockOptions):
        super().__init__()
        transformers = [
            Transformer2DModel(
                plan.width,
                plan.inner,
                plan.heads,
                depth,
                groups=options.groups,
                linear_projection=options.linear_projection,
                only_cross=plan.only_cross,
            )
            for depth in plan.depths
        ]
        self.attentions = nn.ModuleList(transformers) if transformers else None
        self.resnets = nn.ModuleList(resnets)

    def layer(self, i: int, x: FeatureOrPair, context: Context) -> Feature:
        h: Feature = self.resnets[i](x, context.temb)
        return self.attentions[i](h, context) if self.attentions is not None else h


class TextDownBlock2D(TextStage):
    """diffusers' CrossAttnDownBlock2D; DownBlock2D without transformers."""

    def __init__(self, plan: StagePlan, before: int, options: TextBlockOptions, *, downsample: bool):
        widths = [before] + [plan.width] * (plan.layers - 1)
        super().__init__(plan, [ResnetBlock2D(width, plan.width, options.resnets) for width in widths], options)
        padding = options.resnets.downsample_padding
        self.downsamplers = nn.ModuleList([Downsample2D(plan.width, padding)]) if downsample else None

    def forward(self, x: Feature, context: Context) -> tuple[Feature, list[Feature]]:
        """Return the output, and the outputs of all layers as skip connections."""
        skips = []
        for i in range(len(self.resnets)):
            x = self.layer(i, x, context)
            skips.append(x)
        if self.downsamplers is not None:
            x = self.downsamplers[0](x)
            skips.append(x)
        return x, skips


class TextUpBlock2D(TextStage):
    """diffusers' CrossAttnUpBlock2D; UpBlock2D without transformers."""

    def __init__(self, plan: StagePlan, before: int, above: int, options: TextBlockOptions, *, upsample: bool):
        more = plan.layers - 1
        inputs = zip([before] + [plan.width] * more, [plan.width] * more + [above], strict=True)  # and skip connections
        resnets = [ResnetBlock2D(x + skip, plan.width, options.resnets) for x, skip in inputs]
        super().__init__(plan, resnets, options)
        self.upsamplers = nn.ModuleList([Upsample2D(plan.width)]) if upsample else None

    def forward(self, x: Feature, skips: list[Feature], context: Context) -> Feature:
        """Run the stage. It pops its skip connections from `skips`; the output has the size of the next one."""
        for i in range(len(self.resnets)):
            x = self.layer(i, (x, skips.pop()), context)
        if self.upsamplers is None:
            return x
        height, width = skips[-1].x.shape[1:3]
        return self.upsamplers[0](x, (height, width))


class TextMidBlock2D(TextStage):
    """diffusers' UNetMidBlock2DCrossAttn; UNetMidBlock2D, one residual block, without a transformer."""

    def __init__(self, plan: StagePlan, options: TextBlockOptions, *, scale: float):
        count = 1 + len(plan.depths)
        resnets = [ResnetBlock2D(plan.width, plan.width, options.resnets, output_scale=scale) for _ in range(count)]
        super().__init__(plan, resnets, options)

    def forward(self, x: Feature, context: Context) -> Feature:
        x = self.layer(0, x, context)
        return self.resnets[1](x, context.temb) if self.attentions is not None else x

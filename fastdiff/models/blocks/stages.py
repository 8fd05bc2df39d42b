"""The stages of the U-Net: down, mid and up blocks, with diffusers' names."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn

from fastdiff.models.blocks.attention import Attention
from fastdiff.models.blocks.layers import Conv2d, Feature, FeatureOrPair, GroupNorm
from fastdiff.models.blocks.resampling import Downsample2D, Upsample2D, average_down, fir_down, fir_up, nearest_up
from fastdiff.models.blocks.resnet import BlockOptions, Conditioned, Resample, ResnetBlock2D, ResnetBlockCondNorm2D

Inputs = list[tuple[int, int]]  # for each residual block of an up stage: the widths of its input and skip connection
Down = tuple[Feature, list[Feature], Feature]  # the output, its skip connections, the picture that skip blocks pass on
Up = tuple[Feature, Feature | None]  # the output, the picture that skip blocks pass on


def _attention(channels: int, options: BlockOptions, groups: int | None, output_scale: float = 1.0) -> Attention:
    return Attention(channels, options.head_dim or channels, groups, options.eps, output_scale)


class Stage(nn.Module):
    """Residual blocks at one resolution, each followed by an attention if the stage has attention."""

    def __init__(self, resnets: Sequence[Conditioned], attentions: Sequence[Attention] | None):
        super().__init__()
        self.attentions = nn.ModuleList(attentions) if attentions else None
        self.resnets = nn.ModuleList(resnets)

    def layer(self, i: int, x: FeatureOrPair, temb: Tensor | None = None) -> Feature:
        h: Feature = self.resnets[i](x, temb)
        return self.attentions[i](h) if self.attentions is not None else h


class DownStage(Stage):
    """A stage of which each output is a skip connection."""

    def forward(self, x: Feature, temb: Tensor, rgb: Feature) -> Down:
        skips = []
        for i in range(len(self.resnets)):
            x = self.layer(i, x, temb)
            skips.append(x)
        return self.downsample(x, skips, temb, rgb)

    def downsample(self, x: Feature, skips: list[Feature], temb: Tensor, rgb: Feature) -> Down:
        raise NotImplementedError


class UpStage(Stage):
    """A stage of which each residual block reads its input and a skip connection."""

    def forward(self, x: Feature, skips: list[Feature], temb: Tensor, rgb: Feature | None) -> Up:
        """Run the stage. It pops its skip connections from the end of `skips`."""
        for i in range(len(self.resnets)):
            x = self.layer(i, (x, skips.pop()), temb)
        return self.upsample(x, temb, rgb)

    def upsample(self, x: Feature, temb: Tensor, rgb: Feature | None) -> Up:
        raise NotImplementedError


def _resampler(module: nn.Module | None) -> nn.ModuleList | None:
    return nn.ModuleList([module]) if module is not None else None


def _resample(resamplers: nn.ModuleList, x: Feature, temb: Tensor) -> Feature:
    return resamplers[0](x, temb) if isinstance(resamplers[0], Conditioned) else resamplers[0](x)


class DownBlock2D(DownStage):
    """diffusers' DownBlock2D; AttnDownBlock2D with attention, ResnetDownsampleBlock2D with resample "resnet"."""

    def __init__(self, widths: list[int], options: BlockOptions, *, attention: bool, resample: str | None):
        out = widths[-1]
        resnets = [ResnetBlock2D(i, o, options) for i, o in pairwise(widths)]
        super().__init__(resnets, [_attention(out, options, options.num_groups) for _ in resnets if attention])
        kinds: dict[str | None, Callable[[], nn.Module | None]] = {
            None: lambda: None,
            "conv": lambda: Downsample2D(out, options.downsample_padding),
            "resnet": lambda: ResnetBlock2D(out, out, options, resample=average_down),
        }
        self.downsamplers = _resampler(kinds[resample]())

    def downsample(self, x: Feature, skips: list[Feature], temb: Tensor, rgb: Feature) -> Down:
        if self.downsamplers is not None:
            x = _resample(self.downsamplers, x, temb)
            skips.append(x)
        return x, skips, rgb


class UpBlock2D(UpStage):
    """diffusers' UpBlock2D; AttnUpBlock2D with attention, ResnetUpsampleBlock2D with resample "resnet"."""

    def __init__(self, inputs: Inputs, out: int, options: BlockOptions, *, attention: bool, resample: str | None):
        resnets = [ResnetBlock2D(x + skip, out, options) for x, skip in inputs]
        super().__init__(resnets, [_attention(out, options, options.num_groups) for _ in resnets if attention])
        kinds: dict[str | None, Callable[[], nn.Module | None]] = {
            None: lambda: None,
            "conv": lambda: Upsample2D(out),
            "resnet": lambda: ResnetBlock2D(out, out, options, resample=nearest_up),
        }
        self.upsamplers = _resampler(kinds[resample]())

    def upsample(self, x: Feature, temb: Tensor, rgb: Feature | None) -> Up:
        return (x if self.upsamplers is None else _resample(self.upsamplers, x, temb)), rgb


# Skip blocks: they resample with FIR filters, choose their own groups, and read or add to the picture at every level.

SKIP_SCALE = 2.0**0.5


def _skip_groups(channels: int) -> int:
    return min(channels // 4, 32)


def _skip_resampler(channels: int, options: BlockOptions, resample: Resample) -> ResnetBlock2D:
    groups = (_skip_groups(channels),) * 2
    return ResnetBlock2D(
        channels, channels, options, groups=groups, output_scale=SKIP_SCALE, resample=resample, shortcut=True
    )


class SkipDownBlock2D(DownStage):
    """diffusers' SkipDownBlock2D; AttnSkipDownBlock2D with attention."""

    def __init__(self, widths: list[int], options: BlockOptions, *, attention: bool, resample: bool):
        out = widths[-1]
        resnets = [
            ResnetBlock2D(i, o, options, groups=(_skip_groups(i), _skip_groups(o)), output_scale=SKIP_SCALE)
            for i, o in pairwise(widths)
        ]
        super().__init__(resnets, [_attention(out, options, 32, SKIP_SCALE) for _ in resnets if attention])
        self.resnet_down = _skip_resampler(out, options, fir_down) if resample else None
        self.skip_conv = Conv2d(3, out, 1) if resample else None

    def downsample(self, x: Feature, skips: list[Feature], temb: Tensor, rgb: Feature) -> Down:
        if self.resnet_down is not None and self.skip_conv is not None:
            rgb = fir_down(rgb)
            x = self.skip_conv(rgb, residual=self.resnet_down(x, temb))
            skips.append(x)
        return x, skips, rgb


class SkipUpBlock2D(UpStage):
    """diffusers' SkipUpBlock2D; AttnSkipUpBlock2D with attention, which is one after all residual blocks."""

    def __init__(self, inputs: Inputs, out: int, options: BlockOptions, *, attention: bool, resample: bool):
        # With attention, diffusers divides only the skip's width by 4.
        groups = [min(x + skip // 4, 32) if attention else _skip_groups(x + skip) for x, skip in inputs]
        resnets = [
            ResnetBlock2D(x + skip, out, options, groups=(group, _skip_groups(out)), output_scale=SKIP_SCALE)
            for (x, skip), group in zip(inputs, groups, strict=True)
        ]
        super().__init__(resnets, [_attention(out, options, 32, SKIP_SCALE)] if attention else None)
        self.resnet_up = _skip_resampler(out, options, fir_up) if resample else None
        self.skip_conv = Conv2d(out, 3, 3) if resample else None
        self.skip_norm = GroupNorm(_skip_groups(out), out, eps=options.eps) if resample else None

    def layer(self, i: int, x: FeatureOrPair, temb: Tensor | None = None) -> Feature:
        return self.resnets[i](x, temb)

    def upsample(self, x: Feature, temb: Tensor, rgb: Feature | None) -> Up:
        x = self.attentions[0](x) if self.attentions is not None else x
        rgb = fir_up(rgb) if rgb is not None else None
        if self.resnet_up is not None and self.skip_conv is not None and self.skip_norm is not None:
            rgb = self.skip_conv(self.skip_norm(x, activation="silu"), residual=rgb, moments=False)
            x = self.resnet_up(x, temb)
        return x, rgb


# K blocks (k-diffusion's U-Net): groups of 32 channels, time in every norm, one skip connection per stage.

K_GROUP_SIZE = 32


def k_resnet(
    in_channels: int, out_channels: int, groups_out: int, options: BlockOptions, last: int | None = None
) -> ResnetBlockCondNorm2D:
    """Return a residual block of a K block. `groups_out` channels decide the groups of its second norm."""
    groups = in_channels // K_GROUP_SIZE, groups_out // K_GROUP_SIZE
    return ResnetBlockCondNorm2D(in_channels, out_channels, options, groups=groups, last=last)


class KDownBlock2D(DownStage):
    """diffusers' KDownBlock2D."""

    def __init__(self, widths: list[int], options: BlockOptions, *, resample: bool):
        super().__init__([k_resnet(i, o, o, options) for i, o in pairwise(widths)], None)
        self.resample = resample

    def downsample(self, x: Feature, skips: list[Feature], temb: Tensor, rgb: Feature) -> Down:
        return (fir_down(x, "reflect") if self.resample else x), skips, rgb


class KUpBlock2D(UpStage):
    """diffusers' KUpBlock2D. Its last residual block already has the width of the next stage."""

    def __init__(self, out: int, above: int, layers: int, options: BlockOptions, *, resample: bool):
        widths = [2 * out] + [out] * (layers - 1) + [above]
        super().__init__([k_resnet(i, o, out, options) for i, o in pairwise(widths)], None)
        self.resample = resample

    def forward(self, x: Feature, skips: list[Feature], temb: Tensor, rgb: Feature | None) -> Up:
        skip = skips[-1]
        del skips[-len(self.resnets) :]
        for i in range(len(self.resnets)):
            x = self.layer(i, x if i else (x, skip), temb)
        return (fir_up(x, "reflect") if self.resample else x), rgb


class MidBlock2D(Stage):
    """Resnet, attention, resnet; diffusers' UNetMidBlock2D."""

    def __init__(
        self, width: int, options: BlockOptions, *, attention_groups: int | None, add_attention: bool, scale: float
    ):
        groups = options.num_groups or min(width // 4, 32)
        if attention_groups is None and not options.scale_shift:
            attention_groups = groups
        resnets = [ResnetBlock2D(width, width, options, groups=(groups, groups), output_scale=scale) for _ in range(2)]
        super().__init__(resnets, [_attention(width, options, attention_groups, scale)] if add_attention else None)

    def forward(self, x: Feature, temb: Tensor | None = None) -> Feature:
        x = self.resnets[0](x, temb)
        x = self.attentions[0](x) if self.attentions is not None else x
        return self.resnets[1](x, temb)

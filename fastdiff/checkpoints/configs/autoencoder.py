"""The configs of AutoencoderKL and AutoencoderTiny. Unknown options are errors, never ignored."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval, Len

from fastdiff.checkpoints.configs.model import ModelConfig, Place, check_block_types
from fastdiff.errors import InputError
from fastdiff.kinds import (
    MAX_CHANNELS,
    MAX_LEVELS,
    MAX_STAGE_LAYERS,
    Activation,
    BlockTypes,
    Channels,
    PositiveNumber,
    Side,
    StageLayers,
    Widths,
    canonical,
)

PerChannel = Annotated[tuple[float, ...], Len(1, MAX_CHANNELS)]


class AutoencoderConfig(ModelConfig):
    """The base class of the autoencoders' configs: what decoding of latents needs to know."""

    in_channels: int
    out_channels: int
    latent_channels: int
    scaling_factor: float
    shift_factor: float | None = None  # only Z-Image's pipelines add it, as in diffusers
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None

    @property
    def scale(self) -> int:
        """The pixels of a decoded picture per latent, along height and along width."""
        raise NotImplementedError


@dataclass(frozen=True)
class AutoencoderKLConfig(AutoencoderConfig):
    """The config of an AutoencoderKL, with diffusers' option names and defaults."""

    in_channels: Channels = 3
    out_channels: Channels = 3
    down_block_types: BlockTypes = ("DownEncoderBlock2D",)
    up_block_types: BlockTypes = ("UpDecoderBlock2D",)
    block_out_channels: Widths = (64,)
    layers_per_block: StageLayers = 1
    act_fn: Activation = "silu"
    latent_channels: Channels = 4
    norm_num_groups: Channels = 32
    sample_size: Side | tuple[Side, Side] = 32  # pixels; also the side of a tile when tiling is enabled
    scaling_factor: PositiveNumber = 0.18215  # latents are multiplied by it before the denoiser reads them
    shift_factor: float | None = None
    latents_mean: PerChannel | None = None
    latents_std: PerChannel | None = None
    force_upcast: bool = True  # compute float16 weights in float32
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    def check(self) -> None:
        for name, kinds, known in (
            ("down_block_types", self.down_kinds, ("DownEncoderBlock2D", "AttnDownEncoderBlock2D")),
            ("up_block_types", self.up_kinds, ("UpDecoderBlock2D", "AttnUpDecoderBlock2D")),
        ):
            check_block_types(name, kinds, known)
        if not len(self.block_out_channels) == len(self.down_kinds) == len(self.up_kinds):
            raise InputError("block_out_channels, down_block_types and up_block_types must have the same length")
        for name in ("latents_mean", "latents_std"):
            value = getattr(self, name)
            if value is not None and len(value) != self.latent_channels:
                raise InputError(
                    f"{name}: {len(value)} given for {self.latent_channels} latent_channels; give one for each"
                )

    @property
    def activation(self) -> str:
        """The canonical name of `act_fn`."""
        return canonical(self.act_fn)

    @property
    def down_kinds(self) -> tuple[str, ...]:
        """The down block types, without the UNetRes prefix of early models."""
        return tuple(kind.removeprefix("UNetRes") for kind in self.down_block_types)

    @property
    def up_kinds(self) -> tuple[str, ...]:
        return tuple(kind.removeprefix("UNetRes") for kind in self.up_block_types)

    @property
    def scale(self) -> int:
        return 2 ** (len(self.block_out_channels) - 1)

    @property
    def tile_size(self) -> int:
        """The side of a tile, in pixels. Of a height and a width it is the height, as in diffusers."""
        return self.sample_size if isinstance(self.sample_size, int) else self.sample_size[0]

    @property
    def places(self) -> dict[str, Place]:
        down = "encoder.down_blocks."
        stages = enumerate(self.block_out_channels)
        found = {f"block_out_channels[{i}]": Place(f"{down}{i}.resnets.0.conv2.weight", 0, w) for i, w in stages}
        return found | {
            "block_out_channels: its length": Place(down, None, len(self.block_out_channels)),
            "layers_per_block": Place(f"{down}0.resnets.", None, self.layers_per_block),
            "in_channels": Place("encoder.conv_in.weight", 1, self.in_channels),
            "out_channels": Place("decoder.conv_out.weight", 0, self.out_channels),
            "latent_channels": Place("decoder.conv_in.weight", 1, self.latent_channels),
        }

    @property
    def least_parameters(self) -> dict[str, int]:
        first, last = self.block_out_channels[0], self.block_out_channels[-1]
        convolutions = 9 * sum(width**2 for width in self.block_out_channels)  # one of 3x3 per down block
        return {
            "block_out_channels": convolutions,
            "layers_per_block": self.layers_per_block * convolutions,
            "in_channels": 9 * self.in_channels * first,
            "out_channels": 9 * self.out_channels * first,
            "latent_channels": 9 * self.latent_channels * last,
        }


Blocks = Annotated[tuple[Annotated[int, Interval(ge=0, le=MAX_STAGE_LAYERS)], ...], Len(1, MAX_LEVELS)]  # per stage


@dataclass(frozen=True)
class AutoencoderTinyConfig(AutoencoderConfig):
    """The config of an AutoencoderTiny, with diffusers' option names and defaults."""

    in_channels: Channels = 3
    out_channels: Channels = 3
    encoder_block_out_channels: Widths = (64, 64, 64, 64)
    decoder_block_out_channels: Widths = (64, 64, 64, 64)
    act_fn: Activation = "relu"
    upsample_fn: Literal["nearest", "nearest-exact", "bilinear", "bicubic"] = "nearest"
    latent_channels: Channels = 4
    upsampling_scaling_factor: Annotated[int, Interval(ge=1, le=8)] = 2
    num_encoder_blocks: Blocks = (1, 3, 3, 3)
    num_decoder_blocks: Blocks = (3, 3, 3, 1)
    latent_magnitude: PositiveNumber = 3  # of latents that `forward` stores in bytes
    latent_shift: float = 0.5
    force_upcast: bool = False  # no effect, as in diffusers
    scaling_factor: PositiveNumber = 1.0
    shift_factor: float | None = 0.0  # no effect, as in diffusers
    block_out_channels: Widths | None = None  # no effect: a copy of decoder_block_out_channels, as in diffusers

    def check(self) -> None:
        object.__setattr__(self, "block_out_channels", self.decoder_block_out_channels)
        for widths, blocks in (
            ("encoder_block_out_channels", "num_encoder_blocks"),
            ("decoder_block_out_channels", "num_decoder_blocks"),
        ):
            counts = [len(getattr(self, name)) for name in (widths, blocks)]
            if counts[0] != counts[1]:
                raise InputError(f"{blocks}: {counts[1]} given for {counts[0]} {widths}; give one for each")
            different = [width for width in getattr(self, widths) if width != getattr(self, widths)[0]]
            if different:
                raise InputError(f"{widths}: {different[0]} differs from the first; all stages must have one width")

    @property
    def activation(self) -> str:
        """The canonical name of `act_fn`."""
        return canonical(self.act_fn)

    @property
    def scale(self) -> int:
        return self.upsampling_scaling_factor ** (len(self.num_decoder_blocks) - 1)

    @property
    def encoder_scale(self) -> int:
        """The pixels of a picture per latent that is encoded. diffusers' encoder always halves."""
        return 2 ** (len(self.num_encoder_blocks) - 1)

    @property
    def places(self) -> dict[str, Place]:
        ends = {"encoder": len(self.num_encoder_blocks) + sum(self.num_encoder_blocks)}
        ends["decoder"] = 1 + sum(self.num_decoder_blocks) + 2 * len(self.num_decoder_blocks) - 1
        return {
            "encoder_block_out_channels": Place("encoder.layers.0.weight", 0, self.encoder_block_out_channels[0]),
            "decoder_block_out_channels": Place("decoder.layers.0.weight", 0, self.decoder_block_out_channels[0]),
            "in_channels": Place("encoder.layers.0.weight", 1, self.in_channels),
            "out_channels": Place(f"decoder.layers.{ends['decoder']}.weight", 0, self.out_channels),
            "latent_channels": Place(f"encoder.layers.{ends['encoder']}.weight", 0, self.latent_channels),
        }

    @property
    def least_parameters(self) -> dict[str, int]:
        first, last = self.encoder_block_out_channels[0], self.decoder_block_out_channels[0]
        return {
            "num_encoder_blocks": 27 * first**2 * sum(self.num_encoder_blocks),
            "num_decoder_blocks": 27 * last**2 * sum(self.num_decoder_blocks),
            "encoder_block_out_channels": 9 * first**2 * (len(self.encoder_block_out_channels) - 1),
            "decoder_block_out_channels": 9 * last**2 * (len(self.decoder_block_out_channels) - 1),
            "in_channels": 9 * self.in_channels * first,
            "out_channels": 9 * self.out_channels * last,
            "latent_channels": 9 * self.latent_channels * (first + last),
        }

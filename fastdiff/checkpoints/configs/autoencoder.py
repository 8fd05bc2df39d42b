"""The config of an AutoencoderKL. Unknown options are errors, never ignored."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Len

from fastdiff.checkpoints.configs.model import ModelConfig, Place, check_block_types
from fastdiff.errors import InputError
from fastdiff.kinds import (
    MAX_CHANNELS,
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


@dataclass(frozen=True)
class AutoencoderKLConfig(ModelConfig):
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
    sample_size: Side = 32  # pixels; also the side of a tile when tiling is enabled
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
        """The pixels of a picture per latent, along height and along width."""
        return 2 ** (len(self.block_out_channels) - 1)

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

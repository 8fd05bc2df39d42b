"""The options of an AutoencoderKL. An unknown one is an error, never ignored."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Len

from fastdiff.checkpoints.kinds import (
    MAX_CHANNELS,
    Activation,
    BlockTypes,
    Channels,
    PositiveNumber,
    Side,
    StageLayers,
    Widths,
)
from fastdiff.schema import Schema

PerChannel = Annotated[tuple[float, ...], Len(1, MAX_CHANNELS)]


@dataclass(frozen=True)
class AutoencoderKLConfig(Schema):
    """The options of diffusers' AutoencoderKL, by the same names and with the same defaults."""

    in_channels: Channels = 3
    out_channels: Channels = 3
    down_block_types: BlockTypes = ("DownEncoderBlock2D",)
    up_block_types: BlockTypes = ("UpDecoderBlock2D",)
    block_out_channels: Widths = (64,)
    layers_per_block: StageLayers = 1
    act_fn: Activation = "silu"
    latent_channels: Channels = 4
    norm_num_groups: Channels = 32
    sample_size: Side = 32  # pixels
    scaling_factor: PositiveNumber = 0.18215  # of latents, before the denoiser sees them
    shift_factor: float | None = None
    latents_mean: PerChannel | None = None
    latents_std: PerChannel | None = None
    force_upcast: bool = True  # to float32, where the weights are 16-bit
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    @property
    def scale(self) -> int:
        """How many pixels of a picture one latent stands for, in height and in width."""
        return 2 ** (len(self.block_out_channels) - 1)

"""The config of a UNet2DModel. Unknown options are errors, never ignored."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.model import Place, check_block_types
from fastdiff.errors import InputError
from fastdiff.kinds import (
    MAX_LABELS,
    Activation,
    BlockTypes,
    Channels,
    Fraction,
    FrequencyShift,
    PositiveNumber,
    Side,
    StageLayers,
    TrainSteps,
    Widths,
    canonical,
)

Resampling = Literal["conv", "resnet", None]


@dataclass(frozen=True)
class UNet2DConfig(DenoiserConfig):
    """The config of a UNet2DModel, with diffusers' option names and defaults."""

    sample_size: Side | tuple[Side, Side] | None = None  # height and width in pixels; the default size to draw
    in_channels: Channels = 3
    out_channels: Channels = 3
    center_input_sample: bool = False  # map the input from [0, 1] to [-1, 1]
    time_embedding_type: Literal["positional", "fourier", "learned"] = "positional"
    time_embedding_dim: Channels | None = None  # None: 4 * block_out_channels[0]
    freq_shift: FrequencyShift = 0
    flip_sin_to_cos: bool = True
    down_block_types: BlockTypes = ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D")
    mid_block_type: Literal["UNetMidBlock2D"] | None = "UNetMidBlock2D"
    up_block_types: BlockTypes = ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    block_out_channels: Widths = (224, 448, 672, 896)
    layers_per_block: StageLayers = 2
    mid_block_scale_factor: PositiveNumber = 1
    downsample_padding: Literal[0, 1] = 1  # 0 pads (0, 1, 0, 1), as in DDPM's models
    downsample_type: Resampling = "conv"  # in attention blocks; None means conv
    upsample_type: Resampling = "conv"
    dropout: Fraction = 0.0  # training only
    act_fn: Activation = "silu"
    attention_head_dim: Channels | None = 8  # None: one head as wide as the block
    norm_num_groups: Channels | None = 32
    attn_norm_num_groups: Channels | None = None  # of the mid block's attention
    norm_eps: Fraction = 1e-5
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    add_attention: bool = True  # in the mid block
    class_embed_type: Literal["timestep", "identity"] | None = None
    # Rows of the label table, with class_embed_type None
    num_class_embeds: Annotated[int, Interval(ge=1, le=MAX_LABELS)] | None = None
    num_train_timesteps: TrainSteps | None = None  # rows of the timestep table, with time_embedding_type learned

    def check(self) -> None:
        for name, kinds, known in (
            ("down_block_types", self.down_kinds, _DOWN_BLOCKS),
            ("up_block_types", self.up_kinds, _UP_BLOCKS),
        ):
            check_block_types(name, kinds, known)
        if not len(self.block_out_channels) == len(self.down_kinds) == len(self.up_kinds):
            raise InputError("block_out_channels, down_block_types and up_block_types must have the same length")
        self._check_time()
        self._check_skip_blocks()

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
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one picture's label: (temb_channels,) is added to the timestep embedding, () is embedded."""
        return (self.temb_channels,) if self.class_embed_type == "identity" else ()

    @property
    def num_timestep_embeds(self) -> int | None:
        return self.num_train_timesteps if self.time_embedding_type == "learned" else None

    @property
    def has_k_blocks(self) -> bool:
        return any(kind.startswith("K") for kind in self.down_kinds + self.up_kinds)

    @property
    def temb_channels(self) -> int:
        """The width of the embedding of time and class."""
        return self.time_embedding_dim or 4 * self.block_out_channels[0]

    @property
    def places(self) -> dict[str, Place]:
        stages = enumerate(self.block_out_channels)
        found = {f"block_out_channels[{i}]": Place(f"down_blocks.{i}.resnets.0.conv2.weight", 0, w) for i, w in stages}
        found |= {
            "block_out_channels: its length": Place("down_blocks.", None, len(self.block_out_channels)),
            "layers_per_block": Place("down_blocks.0.resnets.", None, self.layers_per_block),
            "time_embedding_dim": Place("time_embedding.linear_1.weight", 0, self.temb_channels),
            "in_channels": Place("conv_in.weight", 1, self.in_channels),
            "out_channels": Place("conv_out.weight", 0, self.out_channels),
        }
        return found | {option: Place(f"{key}.weight", 0, size) for option, (key, size, _) in self._tables.items()}

    @property
    def least_parameters(self) -> dict[str, int]:
        first = self.block_out_channels[0]
        convolutions = 9 * sum(width**2 for width in self.block_out_channels)  # one of 3x3 per down block
        return {
            "block_out_channels": convolutions,
            "layers_per_block": self.layers_per_block * convolutions,
            "time_embedding_dim": self.temb_channels**2,
            "in_channels": 9 * self.in_channels * first,
            "out_channels": 9 * self.out_channels * first,
        } | {option: size * width for option, (_, size, width) in self._tables.items()}

    @property
    def _tables(self) -> dict[str, tuple[str, int, int]]:
        """(key, rows, columns) of each embedding table, by the option that sets its rows."""
        tables = {}
        if self.class_embed_type is None and self.num_class_embeds is not None:
            tables["num_class_embeds"] = ("class_embedding", self.num_class_embeds, self.temb_channels)
        if self.time_embedding_type == "learned" and self.num_train_timesteps is not None:
            tables["num_train_timesteps"] = ("time_proj", self.num_train_timesteps, self.block_out_channels[0])
        return tables

    @property
    def size_factor(self) -> int:
        """Height and width must be multiples of this number, so that the skip connections fit."""
        return 2 ** (len(self.block_out_channels) - 1)

    @property
    def min_size(self) -> int:
        """The smallest height and width. K blocks pad by reflection, which needs two pixels."""
        return self.size_factor * (2 if self.has_k_blocks else 1)

    def _check_time(self) -> None:
        if self.time_embedding_type == "learned" and self.num_train_timesteps is None:
            raise InputError("num_train_timesteps: missing, but time_embedding_type 'learned' needs it; give it")
        if self.time_embedding_type == "positional" and self.block_out_channels[0] // 2 == self.freq_shift:
            raise InputError(f"freq_shift: {self.freq_shift} leaves no frequencies; give 0 or 1")

    def _check_skip_blocks(self) -> None:
        """Raise InputError for options that do not fit skip blocks.

        Skip blocks hand the picture from one to the next, so no other block may come before them on the way down, or
        after them on the way up.
        """
        down, up = (["Skip" in kind for kind in kinds] for kinds in (self.down_kinds, self.up_kinds))
        if down != sorted(down, reverse=True) or up != sorted(up):
            raise InputError(
                "down_block_types, up_block_types: skip blocks must be the first down and the last up blocks"
            )
        if any(down + up) and (self.in_channels, self.out_channels) != (3, 3):
            raise InputError("in_channels, out_channels: skip blocks need pictures of 3 channels")
        without_groups = ["Skip" in kind or kind.startswith("K") for kind in self.down_kinds + self.up_kinds]
        if self.norm_num_groups is None and not all(without_groups):
            raise InputError("norm_num_groups: null works with skip blocks and K blocks only; give a number")


_DOWN_BLOCKS = (
    "DownBlock2D",
    "AttnDownBlock2D",
    "ResnetDownsampleBlock2D",
    "SkipDownBlock2D",
    "AttnSkipDownBlock2D",
    "KDownBlock2D",
)
_UP_BLOCKS = (
    "UpBlock2D",
    "AttnUpBlock2D",
    "ResnetUpsampleBlock2D",
    "SkipUpBlock2D",
    "AttnSkipUpBlock2D",
    "KUpBlock2D",
)

"""The config of a UNet1DModel: a planner of trajectories, or a value function.

diffusers' UNet1DModel has two families of blocks. The blocks of audio models (`DownBlock1D` and others) are not
supported. Of the other family, options that diffusers 0.42.1 builds but cannot run are errors.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval, Len

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.model import Place
from fastdiff.errors import InputError
from fastdiff.kinds import (
    MAX_CHANNELS,
    MAX_LEVELS,
    MAX_STAGE_LAYERS,
    Activation,
    BlockTypes,
    Channels,
    FrequencyShift,
    Horizon,
    Widths,
    canonical,
)

GROUPS = 8  # of every norm but the last
UNKNOWN_HORIZON = 65_536  # diffusers' default sample_size; a planner with it does not say its horizon

UpBlockTypes = Annotated[tuple[str, ...], Len(0, MAX_LEVELS)]


@dataclass(frozen=True)
class UNet1DConfig(DenoiserConfig):
    """The config of a UNet1DModel, with diffusers' option names and defaults.

    A policy denoises trajectories (N, C, L). A value function (`is_value_function`) maps each trajectory to one number.
    """

    AXES = ("L",)
    class_embed_type = None

    sample_size: Horizon = UNKNOWN_HORIZON  # the horizon of training; this default means unknown
    sample_rate: Annotated[int, Interval(ge=1)] | None = None  # audio models only
    in_channels: Channels = 2
    out_channels: Channels = 2
    extra_in_channels: Annotated[int, Interval(ge=0, le=MAX_CHANNELS)] = 0  # channels of a sample beyond in_channels
    time_embedding_type: Literal["fourier", "positional"] = "fourier"
    time_embedding_dim: Channels | None = None  # with fourier; None: 2 * block_out_channels[0]
    flip_sin_to_cos: bool = True
    use_timestep_embedding: bool = False  # required by all supported blocks
    freq_shift: FrequencyShift = 0.0
    down_block_types: BlockTypes = ("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D")
    up_block_types: UpBlockTypes = ("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip")
    mid_block_type: str = "UNetMidBlock1D"  # MidResTemporalBlock1D, ValueFunctionMidBlock1D
    out_block_type: Literal["OutConv1DBlock", "ValueFunction"] | None = None  # None: the last up block's output
    block_out_channels: Widths = (32, 32, 64)
    act_fn: Activation | None = None  # required; of the time embedding and the out block
    norm_num_groups: Channels | None = 8  # of OutConv1DBlock; None: channels // 4, at most 32
    # Residual blocks of a stage, not counting the first
    layers_per_block: Annotated[int, Interval(ge=0, le=MAX_STAGE_LAYERS)] = 1
    downsample_each_block: bool = False  # the last down block halves the horizon too; value functions only

    def check(self) -> None:
        for option, kinds, known in self._kinds:
            for kind in kinds:
                _check_kind(option, kind, known)
        if self.act_fn is None:
            raise InputError("act_fn: diffusers cannot run these blocks without one; give silu, mish, gelu or relu")
        if not self.use_timestep_embedding:
            raise InputError("use_timestep_embedding: diffusers cannot run these blocks without it; give true")
        if len(self.block_out_channels) != len(self.down_block_types):
            raise InputError("block_out_channels and down_block_types must have the same length")
        if self.time_width % 2:
            raise InputError(
                f"time_embedding_dim: {self.time_width} is odd; give an even number, half sines and half cosines"
            )
        if self.time_embedding_type == "positional" and self.time_width // 2 == self.freq_shift:
            raise InputError(f"freq_shift: {self.freq_shift} leaves no frequencies; give 0 or 1")
        for i, width in enumerate(self.block_out_channels):
            _check_groups(f"block_out_channels[{i}]", width, GROUPS)
        if self.is_value_function:
            self._check_value_function()
        else:
            self._check_policy()

    @property
    def is_value_function(self) -> bool:
        return self.out_block_type == "ValueFunction"

    @property
    def activation(self) -> str:
        """The canonical name of `act_fn`."""
        assert self.act_fn is not None  # guaranteed by check()
        return canonical(self.act_fn)

    @property
    def num_class_embeds(self) -> None:
        return None

    @property
    def sample_channels(self) -> int:
        return self.in_channels + self.extra_in_channels

    @property
    def last_width(self) -> int:
        """The channels of the last up block's output."""
        return self.out_channels if self.out_block_type is None else self.block_out_channels[0]

    @property
    def time_width(self) -> int:
        """The channels of the time embedding, as the time MLP reads it."""
        first = self.block_out_channels[0]
        return first if self.time_embedding_type == "positional" else self.time_embedding_dim or 2 * first

    @property
    def trained_size(self) -> tuple[int, int] | None:
        return None if self.sample_size == UNKNOWN_HORIZON else (1, self.sample_size)

    @property
    def usual_size(self) -> tuple[int, int]:
        most = self.most_horizon
        return self.trained_size or (1, 4 * self.size_factor if most is None else most // 2)

    @property
    def halvings(self) -> int:
        """How many times the down blocks halve the horizon."""
        return len(self.block_out_channels) - (not self.downsample_each_block)

    @property
    def size_factor(self) -> int:
        """A policy's horizon must be a multiple of this number, so that the skip connections fit."""
        return 1 if self.is_value_function else 2**self.halvings

    @property
    def min_size(self) -> int:
        return self.size_factor

    @property
    def most_horizon(self) -> int | None:
        """The longest horizon of a value function, or None for a policy.

        A value function's last layers read one position, and its mid block halves the horizon twice.
        """
        return 2 ** (self.halvings + 2) if self.is_value_function else None

    def check_size(self, height: int, width: int, scale: int = 1) -> None:
        """Raise InputError unless the model takes trajectories of horizon `width`. Their `height` must be 1."""
        factor, most = scale * self.size_factor, self.most_horizon
        if height != 1:
            raise InputError(f"height {height}: the height of a trajectory is always 1; give 1")
        if most is not None and not 1 <= width <= most:
            raise InputError(f"horizon {width}: this value function takes 1 to {most}, as in diffusers")
        if width < factor or width % factor:
            raise InputError(f"horizon {width}: this model takes multiples of {factor}")

    @property
    def places(self) -> dict[str, Place]:
        first, stages = "down_blocks.0.resnets.", enumerate(self.block_out_channels)
        found = {
            f"block_out_channels[{i}]": Place(f"down_blocks.{i}.resnets.0.conv_in.conv1d.weight", 0, width)
            for i, width in stages
        } | {
            "block_out_channels: its length": Place("down_blocks.", None, len(self.block_out_channels)),
            "up_block_types: its length": Place("up_blocks.", None, len(self.up_block_types)),
            "1 + layers_per_block": Place(first, None, 1 + self.layers_per_block),
            "in_channels + extra_in_channels": Place(f"{first}0.conv_in.conv1d.weight", 1, self.sample_channels),
            "out_channels": Place("out_block.final_conv1d_2.weight", 0, self.out_channels),
        }
        if self.time_embedding_type == "fourier":
            found["time_embedding_dim"] = Place("time_mlp.linear_1.weight", 1, self.time_width)
        return found

    @property
    def least_parameters(self) -> dict[str, int]:
        first = self.block_out_channels[0]
        convolutions = 5 * sum(width**2 for width in self.block_out_channels)  # one of 5 taps per down block
        return {
            "block_out_channels": convolutions,
            "layers_per_block": (1 + self.layers_per_block) * convolutions,
            "time_embedding_dim": self.time_width * first,
            "in_channels": 5 * self.sample_channels * first,
            "out_channels": 0 if self.is_value_function else self.out_channels * first,
        }

    @property
    def _kinds(self) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
        """(option, block types that it names, block types that are supported) for each option that names blocks."""
        return (
            ("down_block_types", self.down_block_types, ("DownResnetBlock1D",)),
            ("up_block_types", self.up_block_types, ("UpResnetBlock1D",)),
            ("mid_block_type", (self.mid_block_type,), ("MidResTemporalBlock1D", "ValueFunctionMidBlock1D")),
        )

    def _check_policy(self) -> None:
        """Raise InputError for a policy that diffusers cannot run."""
        levels = len(self.block_out_channels)
        if self.mid_block_type != "MidResTemporalBlock1D":
            raise InputError(f"mid_block_type: {self.mid_block_type} needs out_block_type 'ValueFunction'")
        if self.downsample_each_block:
            raise InputError(
                "downsample_each_block: diffusers' up blocks cannot read halved skip connections; give false"
            )
        if len(self.up_block_types) not in (levels - 1, levels):
            raise InputError(
                f"up_block_types: {len(self.up_block_types)} given for {levels} down blocks; give one fewer"
            )
        if self.out_block_type is None:
            if not self.up_block_types:
                raise InputError("out_block_type: null needs up_block_types: the last up block makes out_channels")
            _check_groups("out_channels", self.out_channels, GROUPS)
        else:
            _check_groups("block_out_channels[0]", self.last_width, self.out_groups)

    @property
    def out_groups(self) -> int:
        """The groups of OutConv1DBlock's norm."""
        groups = self.norm_num_groups
        return min(self.block_out_channels[0] // 4, 32) if groups is None else groups

    def _check_value_function(self) -> None:
        """Raise InputError for a value function that diffusers cannot run."""
        if self.mid_block_type != "ValueFunctionMidBlock1D":
            raise InputError(
                f"out_block_type: 'ValueFunction' cannot read the output of {self.mid_block_type}; "
                "give mid_block_type 'ValueFunctionMidBlock1D'"
            )
        if self.up_block_types:
            raise InputError("up_block_types: diffusers' cannot read the output of ValueFunctionMidBlock1D; give none")
        _check_groups("block_out_channels[-1] / 4", self.block_out_channels[-1] // 4, GROUPS)


def _check_kind(option: str, kind: object, known: tuple[str, ...]) -> None:
    if kind in _AUDIO_BLOCKS:
        raise InputError(f"{option}: {kind} is a block of audio models; fastdiff runs {' and '.join(known)}")
    if kind not in known:
        raise InputError(f"{option}: {kind!r} is not supported; choose from {', '.join(known)}")


def _check_groups(name: str, width: int, groups: int) -> None:
    if width % groups:
        raise InputError(f"{name}: {width} channels are not divisible into the {groups} groups of their norm")


_AUDIO_BLOCKS = (
    "DownBlock1D",
    "DownBlock1DNoSkip",
    "AttnDownBlock1D",
    "UNetMidBlock1D",
    "UpBlock1D",
    "UpBlock1DNoSkip",
    "AttnUpBlock1D",
)

"""The options of a UNet2DModel. An unknown one is an error, never ignored."""

from dataclasses import dataclass

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig, check_counts, check_most
from fastdiff.checkpoints.configs.places import Place
from fastdiff.checkpoints.limits import (
    MAX_CHANNELS,
    MAX_LABELS,
    MAX_LEVELS,
    MAX_SIDE,
    MAX_STAGE_LAYERS,
    MAX_TRAIN_STEPS,
)
from fastdiff.errors import InputError
from fastdiff.numbers import is_int


@dataclass(frozen=True)
class UNet2DConfig(DenoiserConfig):
    """The options of diffusers' UNet2DModel, by the same names and with the same defaults."""

    sample_size: int | tuple[int, int] | None = None  # height and width, pixels; the default size to draw
    in_channels: int = 3
    out_channels: int = 3
    center_input_sample: bool = False  # the input is in [0, 1] and is brought to [-1, 1]
    time_embedding_type: str = "positional"  # positional, fourier, learned
    time_embedding_dim: int | None = None  # None: 4 * block_out_channels[0]
    freq_shift: int = 0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[str, ...] = ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D")
    mid_block_type: str | None = "UNetMidBlock2D"
    up_block_types: tuple[str, ...] = ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    block_out_channels: tuple[int, ...] = (224, 448, 672, 896)
    layers_per_block: int = 2
    mid_block_scale_factor: float = 1
    downsample_padding: int = 1  # 0 pads (0, 1, 0, 1), as DDPM's models were trained
    downsample_type: str | None = "conv"  # of attention blocks: conv (None too), resnet
    upsample_type: str | None = "conv"
    dropout: float = 0.0  # training only
    act_fn: str = "silu"  # silu, swish, mish, gelu, relu
    attention_head_dim: int | None = 8  # None: one head as wide as the block
    norm_num_groups: int | None = 32
    attn_norm_num_groups: int | None = None  # of the mid block's attention
    norm_eps: float = 1e-5
    resnet_time_scale_shift: str = "default"  # default, scale_shift
    add_attention: bool = True  # in the mid block
    class_embed_type: str | None = None  # None, timestep, identity
    num_class_embeds: int | None = None  # with class_embed_type None: labels are indices into a table
    num_train_timesteps: int | None = None  # with time_embedding_type learned

    def __post_init__(self):
        self._check_choices(_UNET_CHOICES)
        for kinds, known in ((self.down_kinds, _DOWN_BLOCKS), (self.up_kinds, _UP_BLOCKS)):
            for kind in kinds:
                if kind not in known:
                    raise InputError(f"block type {kind!r} is not supported; choose from {', '.join(known)}")
        if not len(self.block_out_channels) == len(self.down_kinds) == len(self.up_kinds) > 0:
            raise InputError(
                "block_out_channels, down_block_types and up_block_types must be of one length, at least 1"
            )
        check_most({"block_out_channels: its length": len(self.block_out_channels)}, MAX_LEVELS)
        self._check_numbers()
        self._check_skip_blocks()

    @property
    def activation(self) -> str:
        """The canonical name of `act_fn`."""
        return "silu" if self.act_fn.lower() == "swish" else self.act_fn.lower()

    @property
    def down_kinds(self) -> tuple[str, ...]:
        """The down blocks' types without the prefix that early models carry."""
        return tuple(kind.removeprefix("UNetRes") for kind in self.down_block_types)

    @property
    def up_kinds(self) -> tuple[str, ...]:
        return tuple(kind.removeprefix("UNetRes") for kind in self.up_block_types)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of a picture's label: a row is added to the embedding of the timestep, a number is embedded."""
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
        convolutions = 9 * sum(width**2 for width in self.block_out_channels)  # of 3x3, one in each down stage's layer
        return {
            "block_out_channels": convolutions,
            "layers_per_block": self.layers_per_block * convolutions,
            "time_embedding_dim": self.temb_channels**2,
            "in_channels": 9 * self.in_channels * first,
            "out_channels": 9 * self.out_channels * first,
        } | {option: size * width for option, (_, size, width) in self._tables.items()}

    @property
    def _tables(self) -> dict[str, tuple[str, int, int]]:
        """The key, rows and columns of each table of embeddings, by the option that asks for the rows."""
        tables = {}
        if self.class_embed_type is None and self.num_class_embeds is not None:
            tables["num_class_embeds"] = ("class_embedding", self.num_class_embeds, self.temb_channels)
        if self.time_embedding_type == "learned" and self.num_train_timesteps is not None:
            tables["num_train_timesteps"] = ("time_proj", self.num_train_timesteps, self.block_out_channels[0])
        return tables

    @property
    def size_factor(self) -> int:
        """The number that height and width must be multiples of, so that the skip connections can join."""
        return 2 ** (len(self.block_out_channels) - 1)

    @property
    def min_size(self) -> int:
        """The least height and width: K blocks reflect the border, for which a pixel is too little."""
        return self.size_factor * (2 if self.has_k_blocks else 1)

    def _check_numbers(self) -> None:
        widths = {f"block_out_channels[{i}]": width for i, width in enumerate(self.block_out_channels)}
        check_counts({"in_channels": self.in_channels, "out_channels": self.out_channels} | widths, MAX_CHANNELS)
        check_counts({"layers_per_block": self.layers_per_block}, MAX_STAGE_LAYERS)
        check_most({"time_embedding_dim": self.time_embedding_dim}, MAX_CHANNELS)
        check_most({"num_class_embeds": self.num_class_embeds}, MAX_LABELS)
        check_most({"num_train_timesteps": self.num_train_timesteps}, MAX_TRAIN_STEPS)
        size = self.sample_size if isinstance(self.sample_size, tuple) else (self.sample_size or 1,) * 2
        if len(size) != 2 or not all(is_int(side, 1) for side in size):
            raise InputError(f"sample_size: {self.sample_size!r} is neither a number nor a height and a width")
        check_most({"sample_size": max(size)}, MAX_SIDE)
        if self.time_embedding_type == "learned" and self.num_train_timesteps is None:
            raise InputError("num_train_timesteps: time_embedding_type 'learned' needs it")
        skip_only = all("Skip" in kind for kind in self.down_kinds + self.up_kinds)
        if self.norm_num_groups is None and not skip_only:
            raise InputError("norm_num_groups: null works with skip blocks only; give a number")

    def _check_skip_blocks(self) -> None:
        """Skip blocks pass the picture on from one to the next, so nothing else may stand between them and it."""
        down, up = (["Skip" in kind for kind in kinds] for kinds in (self.down_kinds, self.up_kinds))
        if down != sorted(down, reverse=True) or up != sorted(up):
            raise InputError(
                "down_block_types, up_block_types: skip blocks must be the first down and the last up blocks"
            )
        if any(down + up) and (self.in_channels, self.out_channels) != (3, 3):
            raise InputError("in_channels, out_channels: skip blocks work on pictures of 3 channels")


_UNET_CHOICES = {
    "time_embedding_type": ("positional", "fourier", "learned"),
    "downsample_padding": (0, 1),
    "downsample_type": ("conv", "resnet", None),
    "upsample_type": ("conv", "resnet", None),
    "resnet_time_scale_shift": ("default", "scale_shift"),
    "class_embed_type": (None, "timestep", "identity"),
    "activation": ("silu", "mish", "gelu", "relu"),
}
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

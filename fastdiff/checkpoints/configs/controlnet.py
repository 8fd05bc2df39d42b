"""The config of a ControlNetModel. Unknown options are errors, never ignored."""

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.model import Place, check_block_types
from fastdiff.checkpoints.configs.unet2d_condition import Depth, Depths, LevelFlags, UNet2DConditionConfig
from fastdiff.errors import InputError
from fastdiff.kinds import (
    MAX_LABELS,
    Activation,
    BlockTypes,
    Channels,
    Fraction,
    FrequencyShift,
    NotGiven,
    PositiveNumber,
    StageLayers,
    Widths,
)
from fastdiff.schema import option_names

DOWN_BLOCKS = ("CrossAttnDownBlock2D", "DownBlock2D")
_OF_THE_UNET = {"out_channels", "conv_in_kernel", "conv_out_kernel", "time_embedding_dim"}  # no option here


@dataclass(frozen=True)
class EncoderConfig(UNet2DConditionConfig):
    """The config of a U-Net with the encoder of a ControlNet, which may have no attention."""

    @property
    def cross_width(self) -> int:
        assert isinstance(self.cross_attention_dim, int)
        return self.cross_attention_dim


@dataclass(frozen=True)
class ControlNetConfig(DenoiserConfig):
    """The config of a ControlNetModel, with diffusers' option names and defaults."""

    in_channels: Channels = 4
    conditioning_channels: Channels = 3  # of a control picture
    flip_sin_to_cos: bool = True
    freq_shift: FrequencyShift = 0
    down_block_types: BlockTypes = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    mid_block_type: Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"] = "UNetMidBlock2DCrossAttn"
    only_cross_attention: bool | LevelFlags = False
    block_out_channels: Widths = (320, 640, 1280, 1280)
    layers_per_block: StageLayers = 2
    downsample_padding: Literal[0, 1] = 1  # 0 pads (0, 1, 0, 1)
    mid_block_scale_factor: PositiveNumber = 1
    act_fn: Activation = "silu"
    norm_num_groups: Channels = 32
    norm_eps: Fraction = 1e-5
    cross_attention_dim: Channels = 1280
    transformer_layers_per_block: Depth | Depths = 1
    encoder_hid_dim: NotGiven = None  # diffusers' forward ignores the projection
    encoder_hid_dim_type: NotGiven = None
    attention_head_dim: Channels | Widths = 8  # the number of heads, if num_attention_heads is None
    num_attention_heads: Channels | Widths | None = None
    use_linear_projection: bool = False
    class_embed_type: Literal["timestep", "identity", "projection"] | None = None
    addition_embed_type: Literal["text", "text_time"] | None = None
    addition_time_embed_dim: Channels | None = None
    num_class_embeds: Annotated[int, Interval(ge=1, le=MAX_LABELS)] | None = None
    upcast_attention: bool | None = False  # no effect: attention scores are always float32
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    projection_class_embeddings_input_dim: Channels | None = None
    controlnet_conditioning_channel_order: Literal["rgb", "bgr"] = "rgb"
    conditioning_embedding_out_channels: Widths = (16, 32, 96, 256)  # each after the first halves the resolution
    global_pool_conditions: bool = False  # residuals are means over the pixels
    addition_embed_type_num_heads: Channels = 64

    sample_size = None

    def check(self) -> None:
        check_block_types("down_block_types", self.down_block_types, DOWN_BLOCKS)
        if self.class_embed_type == "timestep" and self.encoder.activation != "silu":
            raise InputError(f"act_fn: {self.act_fn!r} beside class_embed_type 'timestep' is not supported; use 'silu'")
        self.encoder  # its constructor checks the options that they share  # noqa: B018

    @functools.cached_property
    def encoder(self) -> UNet2DConditionConfig:
        """The config of a U-Net with this encoder. Raises InputError for options that do not fit together."""
        known = option_names(UNet2DConditionConfig)
        shared = {name: value for name, value in self.items() if name in known}
        heads = self.num_attention_heads or self.attention_head_dim
        shared |= {"attention_head_dim": heads, "num_attention_heads": None}
        ups = ("UpBlock2D",) * len(self.down_block_types)
        depths = (1,) * len(self.block_out_channels)
        return EncoderConfig(**shared, up_block_types=ups, reverse_transformer_layers_per_block=depths)

    @property
    def condition_scale(self) -> int:
        """The pixels of a control picture for each latent, along height and along width."""
        return 2 ** (len(self.conditioning_embedding_out_channels) - 1)

    @property
    def label_shape(self) -> tuple[int, ...]:
        return self.encoder.label_shape

    @property
    def prompt_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.encoder.prompt_shapes

    @property
    def size_factor(self) -> int:
        return 1

    @property
    def min_size(self) -> int:
        return self.encoder.min_size

    @property
    def places(self) -> dict[str, Place]:
        found = {name: place for name, place in self.encoder.places.items() if name not in _OF_THE_UNET}
        first, *others = self.conditioning_embedding_out_channels
        name, layers = "conditioning_embedding_out_channels", "controlnet_cond_embedding"
        found["conditioning_channels"] = Place(f"{layers}.conv_in.weight", 1, self.conditioning_channels)
        found[f"{name}: its length"] = Place(f"{layers}.blocks.", None, 2 * len(others))
        found[f"{name}[0]"] = Place(f"{layers}.conv_in.weight", 0, first)
        for i, width in enumerate(others, 1):
            found[f"{name}[{i}]"] = Place(f"{layers}.blocks.{2 * i - 1}.weight", 0, width)
        return found

    @property
    def least_parameters(self) -> dict[str, int]:
        found = {name: count for name, count in self.encoder.least_parameters.items() if name not in _OF_THE_UNET}
        widths = self.conditioning_embedding_out_channels
        found["conditioning_channels"] = 9 * self.conditioning_channels * widths[0]
        return found | {"conditioning_embedding_out_channels": 9 * sum(width**2 for width in widths[:-1])}

    def check_fit(self, theirs: UNet2DConditionConfig, scale: int) -> None:
        """Raise InputError if a ControlNet of this config cannot guide a U-Net of the config `theirs`.

        scale: pixels for each latent.
        """
        remedy = "give one that was trained for this model"
        for name, found, wanted in (
            ("cross_attention_dim", self.cross_attention_dim, theirs.text_width),
            ("in_channels", self.in_channels, theirs.state_channels),
            ("addition_embed_type", self.addition_embed_type, theirs.addition_embed_type),
            ("projection_class_embeddings_input_dim", self.encoder.added_shapes, theirs.added_shapes),
            (
                "block_out_channels, layers_per_block",
                self.encoder.residual_shapes(64, 64),
                theirs.residual_shapes(64, 64),
            ),
        ):
            if found != wanted:
                is_short = isinstance(found, int | str | None)
                differs = f" is {found}, and the U-Net needs {wanted}" if is_short else " differ"
                raise InputError(f"controlnet: its {name}{differs}; {remedy}")
        if self.takes_labels:
            raise InputError("controlnet: it takes class labels, which no prompt gives; call the model directly")
        if theirs.has_k_blocks or theirs.mid_stage is None:
            raise InputError("controlnet: this U-Net's blocks take no residuals of a ControlNet; leave it out")
        if self.condition_scale != scale:
            raise InputError(
                f"controlnet: it shrinks control pictures by {self.condition_scale}, and the VAE by {scale}; {remedy}"
            )

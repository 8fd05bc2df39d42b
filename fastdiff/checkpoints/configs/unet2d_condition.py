"""The config of a UNet2DConditionModel. Unknown options are errors, never ignored."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval, Len

from fastdiff.checkpoints.configs.model import Place
from fastdiff.checkpoints.configs.unet2d_condition_stages import StagedConfig
from fastdiff.errors import InputError
from fastdiff.kinds import (
    MAX_LABELS,
    MAX_LEVELS,
    MAX_STAGE_LAYERS,
    Activation,
    BlockTypes,
    Channels,
    Fraction,
    FrequencyShift,
    NotGiven,
    Off,
    PositiveNumber,
    Side,
    StageLayers,
    Widths,
    canonical,
)
from fastdiff.schema import Wanted

Depth = Annotated[int, Interval(ge=0, le=MAX_STAGE_LAYERS)]  # transformer blocks in a row
Depths = Annotated[
    tuple[Depth | tuple[Depth, ...], ...], Len(1, MAX_LEVELS)
]  # for each level, or for each layer of each level
LevelLayers = Annotated[tuple[StageLayers, ...], Len(1, MAX_LEVELS)]
LevelFlags = Annotated[tuple[bool, ...], Len(1, MAX_LEVELS)]
PlainAttention = Annotated[Literal["default"], Wanted("default, the only attention_type that fastdiff runs")]
Kernel = Annotated[int, Interval(ge=1, le=31)]  # pixels

USUAL_LENGTH = 77  # tokens of a text, as in CLIP
TIME_IDS = 6  # of SDXL: original size, corner, target size
TIME_IDS_OF_REFINER = 5  # original size, corner, aesthetic score
IMAGE_TOKENS, IMAGE_PREFIX = 32, 10  # tokens that image_proj and text_image_proj make of an image, as in diffusers
HINT_SCALE, HINT_CHANNELS = 8, 4  # image_hint makes 4 channels of a hint that is 8 times larger than the sample


@dataclass(frozen=True)
class UNet2DConditionConfig(StagedConfig):
    """The config of a UNet2DConditionModel, with diffusers' option names and defaults."""

    sample_size: Side | tuple[Side, Side] | None = None  # height and width of the latents; the default size to draw
    in_channels: Channels = 4
    out_channels: Channels = 4
    center_input_sample: bool = False  # map the input from [0, 1] to [-1, 1]
    flip_sin_to_cos: bool = True
    freq_shift: FrequencyShift = 0
    down_block_types: BlockTypes = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    mid_block_type: Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2DSimpleCrossAttn", "UNetMidBlock2D"] | None = (
        "UNetMidBlock2DCrossAttn"
    )
    up_block_types: BlockTypes = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
    only_cross_attention: bool | LevelFlags = False
    block_out_channels: Widths = (320, 640, 1280, 1280)
    layers_per_block: StageLayers | LevelLayers = 2
    downsample_padding: Literal[0, 1] = 1  # 0 pads (0, 1, 0, 1)
    mid_block_scale_factor: PositiveNumber = 1
    dropout: Fraction = 0.0  # training only
    act_fn: Activation = "silu"
    norm_num_groups: Channels | None = 32  # None: no last norm and activation; K blocks choose their own groups
    norm_eps: Fraction = 1e-5
    cross_attention_dim: Channels | Widths = 1280
    transformer_layers_per_block: Depth | Depths = 1
    reverse_transformer_layers_per_block: Depths | None = None  # of the up blocks; None: the down blocks', reversed
    encoder_hid_dim: Channels | None = None  # text width, if the model projects it to cross_attention_dim
    encoder_hid_dim_type: Literal["text_proj", "text_image_proj", "image_proj"] | None = None
    # The NUMBER of heads in transformers, despite its name; the channels of a head in the other attentions
    attention_head_dim: Channels | Widths = 8
    num_attention_heads: NotGiven = None  # an error in diffusers too: attention_head_dim is the number of heads
    dual_cross_attention: Off = False  # two texts at once, for Versatile Diffusion
    use_linear_projection: bool = False  # the transformers' projections are linear layers, not convolutions
    class_embed_type: Literal["timestep", "identity", "projection", "simple_projection"] | None = None
    addition_embed_type: Literal["text", "text_image", "text_time", "image", "image_hint"] | None = None
    addition_time_embed_dim: Channels | None = None
    # Rows of the label table, with class_embed_type None
    num_class_embeds: Annotated[int, Interval(ge=1, le=MAX_LABELS)] | None = None
    upcast_attention: bool | None = False  # no effect: attention scores are always float32
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    # Of Resnet and SimpleCrossAttn blocks: residual blocks read the time embedding without an activation before
    resnet_skip_time_act: bool = False
    resnet_out_scale_factor: PositiveNumber = 1.0  # of Resnet and SimpleCrossAttn blocks
    time_embedding_type: Literal["positional", "fourier"] = "positional"
    time_embedding_dim: Channels | None = None  # None: 4 * block_out_channels[0]; fourier: 2 * of it
    time_embedding_act_fn: Activation | None = None  # applied once, to the whole embedding
    timestep_post_act: Activation | None = None
    time_cond_proj_dim: Channels | None = None  # width of timestep_cond
    conv_in_kernel: Kernel = 3
    conv_out_kernel: Kernel = 3
    projection_class_embeddings_input_dim: Channels | None = None
    attention_type: PlainAttention = "default"  # other values are for GLIGEN
    class_embeddings_concat: bool = False
    mid_block_only_cross_attention: bool | None = None  # of UNetMidBlock2DSimpleCrossAttn
    cross_attention_norm: Literal["layer_norm", "group_norm"] | None = None  # of the text in SimpleCrossAttn blocks
    addition_embed_type_num_heads: Channels = 64

    def check(self) -> None:
        self.check_stages()
        self._check_text()
        self._check_images()
        self._check_embeddings()
        for name in ("conv_in_kernel", "conv_out_kernel"):
            if getattr(self, name) % 2 == 0:
                raise InputError(f"{name}: {getattr(self, name)} is even, and would change the size; give an odd one")

    @property
    def activation(self) -> str:
        """The canonical name of `act_fn`."""
        return canonical(self.act_fn)

    @property
    def temb_channels(self) -> int:
        """The width of the time embedding, and of the embeddings added to it."""
        return self.time_embedding_dim or self.block_out_channels[0] * (
            4 if self.time_embedding_type != "fourier" else 2
        )

    @property
    def block_temb_channels(self) -> int:
        """The width of the embedding that blocks read: time with class, which is added or concatenated."""
        return self.temb_channels * (2 if self.class_embeddings_concat else 1)

    @property
    def label_shape(self) -> tuple[int, ...]:
        if self.class_embed_type == "identity":
            return (self.temb_channels,)
        is_projected = self.class_embed_type in ("projection", "simple_projection")
        return (self.projection_class_embeddings_input_dim or 0,) if is_projected else ()

    @property
    def text_width(self) -> int:
        """The channels of encoder_hidden_states."""
        return self.encoder_hid_dim or self.cross_width

    @property
    def reads_text(self) -> bool:
        """Whether the prediction depends on encoder_hidden_states. With `image_proj`, an image replaces the text."""
        return self.encoder_hid_dim_type != "image_proj" or self.addition_embed_type == "text"

    def tokens(self, length: int) -> int:
        """Return the number of tokens that the attentions read, for a text of `length` tokens."""
        return {"image_proj": IMAGE_TOKENS, "text_image_proj": IMAGE_PREFIX + length}.get(
            str(self.encoder_hid_dim_type), length
        )

    @property
    def sample_channels(self) -> int:
        """The channels of a sample. With `image_hint`, the hint has the others."""
        return self.in_channels - (HINT_CHANNELS if self.addition_embed_type == "image_hint" else 0)

    @property
    def state_channels(self) -> int:
        """The channels of x_t. An inpainting model also reads a mask and as many channels of the masked picture."""
        own = self.sample_channels
        return self.out_channels if own == 2 * self.out_channels + 1 else own

    @property
    def image_width(self) -> int | None:
        """The channels of image_embeds, or None if the model reads none."""
        widths = {"text_image_proj": self.cross_width, "image_proj": self.encoder_hid_dim}
        added = {"text_image": self.cross_width, "image": self.encoder_hid_dim, "image_hint": self.encoder_hid_dim}
        return widths.get(str(self.encoder_hid_dim_type)) or added.get(str(self.addition_embed_type))

    @property
    def added_shapes(self) -> dict[str, tuple[int, ...]]:
        """The entries of added_cond_kwargs: name to shape for one picture of `usual_size`."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self._has_time_ids:
            shapes |= {"text_embeds": (self.pooled_width(TIME_IDS),)}
            shapes |= {"time_ids": (TIME_IDS,)}
        if self.addition_embed_type == "text_image":
            shapes |= {"text_embeds": (self.cross_width,)}
        if self.image_width is not None:
            shapes |= {"image_embeds": (self.image_width,)}
        if self.addition_embed_type == "image_hint":
            height, width = self.usual_size
            shapes |= {"hint": (3, HINT_SCALE * height, HINT_SCALE * width)}
        return shapes

    def pooled_width(self, time_ids: int) -> int:
        """Return the width of SDXL's pooled text beside so many time ids."""
        return (self.projection_class_embeddings_input_dim or 0) - time_ids * (self.addition_time_embed_dim or 0)

    @property
    def prompt_shapes(self) -> dict[str, tuple[int, ...]]:
        """See DenoiserConfig. `added_shapes` gives the shapes after the first one."""
        return {"encoder_hidden_states": (USUAL_LENGTH, self.text_width)} | self.added_shapes

    @property
    def places(self) -> dict[str, Place]:
        found = {
            "block_out_channels: its length": Place("down_blocks.", None, len(self.block_out_channels)),
            "time_embedding_dim": Place("time_embedding.linear_1.weight", 0, self.temb_channels),
            "in_channels": Place("conv_in.weight", 1, self.in_channels),
            "out_channels": Place("conv_out.weight", 0, self.out_channels),
            "conv_in_kernel": Place("conv_in.weight", 2, self.conv_in_kernel),
            "conv_out_kernel": Place("conv_out.weight", 2, self.conv_out_kernel),
        }
        for i, stage in enumerate(self.down_stages):
            found[f"block_out_channels[{i}]"] = Place(f"{stage.name}.resnets.0.conv2.weight", 0, stage.width)
            found[f"layers_per_block[{i}]"] = Place(f"{stage.name}.resnets.", None, stage.layers)
        for stage in self.all_stages():
            for layer, depth in enumerate(stage.depths):
                blocks = f"{stage.name}.attentions.{layer}.transformer_blocks."
                found[f"transformer_layers_per_block of {stage.name}, layer {layer},"] = Place(blocks, None, depth)
                found[f"cross_attention_dim at {blocks}"] = Place(f"{blocks}0.attn2.to_k.weight", 1, self.cross_width)
            reader = {"added": "add_k_proj", "k": "attn2.to_k"}.get(str(stage.block.attention))
            if reader is not None:
                key = f"{stage.name}.attentions.0.{reader}.weight"
                found[f"cross_attention_dim at {stage.name}"] = Place(key, 1, self.cross_width)
        return found | {option: Place(key, axis, size) for option, (key, axis, size, _) in self._layers.items()}

    @property
    def least_parameters(self) -> dict[str, int]:
        first, stages = self.block_out_channels[0], self.down_stages
        return {
            "block_out_channels": 9 * sum(stage.width**2 for stage in stages),
            "layers_per_block": 9 * sum(stage.layers * stage.width**2 for stage in stages),
            "transformer_layers_per_block": 16 * sum(sum(each.depths) * each.inner**2 for each in self.all_stages()),
            "cross_attention_dim": 2 * self.cross_width * sum(sum(each.depths) * each.inner for each in stages),
            "time_embedding_dim": self.temb_channels**2,
            "in_channels": self.conv_in_kernel**2 * self.in_channels * first,
            "out_channels": self.conv_out_kernel**2 * self.out_channels * first,
        } | {option: size * width for option, (_, _, size, width) in self._layers.items()}

    @property
    def _layers(self) -> dict[str, tuple[str, int, int, int]]:
        """(key, axis, size, size along the other axis) of each optional layer, by the option that adds it."""
        found = {}
        if self.class_embed_type is None and self.num_class_embeds is not None:
            found["num_class_embeds"] = ("class_embedding.weight", 0, self.num_class_embeds, self.temb_channels)
        if self.encoder_hid_dim is not None:
            layer = {"text_image_proj": ".text_proj", "image_proj": ".image_embeds"}.get(
                str(self.encoder_hid_dim_type), ""
            )
            key = f"encoder_hid_proj{layer}.weight"
            found["encoder_hid_dim"] = (key, 1, self.encoder_hid_dim, self.cross_width)
        if self.time_cond_proj_dim is not None:
            key = "time_embedding.cond_proj.weight"
            found["time_cond_proj_dim"] = (key, 1, self.time_cond_proj_dim, 1)
        width = self.projection_class_embeddings_input_dim
        keys = {"projection": "class_embedding.linear_1.weight", "simple_projection": "class_embedding.weight"}
        reader = keys.get(str(self.class_embed_type)) or (
            "add_embedding.linear_1.weight" if self._has_time_ids else None
        )
        if width is not None and reader is not None:
            found["projection_class_embeddings_input_dim"] = (reader, 1, width, self.temb_channels)
        return found

    @property
    def _has_time_ids(self) -> bool:
        return self.addition_embed_type == "text_time"

    def _check_text(self) -> None:
        if self.encoder_hid_dim_type is not None and self.encoder_hid_dim is None:
            raise InputError(
                f"encoder_hid_dim: missing, but encoder_hid_dim_type {self.encoder_hid_dim_type} needs it; give it"
            )
        heads, width = self.addition_embed_type_num_heads, self.text_width
        if self.addition_embed_type == "text" and width % heads:
            raise InputError(f"addition_embed_type_num_heads: {heads} does not divide the text's {width} channels")

    def _check_images(self) -> None:
        projection, addition = self.encoder_hid_dim_type, self.addition_embed_type
        if addition in ("image", "image_hint") and self.encoder_hid_dim is None:
            raise InputError(f"encoder_hid_dim: missing, but addition_embed_type {addition!r} needs it; give it")
        if addition == "image_hint" and self.in_channels <= HINT_CHANNELS:
            raise InputError(
                f"in_channels: {self.in_channels}, but {HINT_CHANNELS} of them are the hint's; give a larger number"
            )
        crossed = (projection == "text_image_proj" and addition in ("image", "image_hint")) or (
            projection == "image_proj" and addition == "text_image"
        )
        if crossed and self.encoder_hid_dim != self.cross_width:
            raise InputError(
                f"encoder_hid_dim: {self.encoder_hid_dim}, but {projection} and {addition} read the same image_embeds; "
                f"give {self.cross_width}"
            )

    def _check_embeddings(self) -> None:
        needs_width = [
            f"{name} {value!r}"
            for name, value in (("class_embed_type", self.class_embed_type), ("addition_embed_type", "text_time"))
            if value in ("projection", "simple_projection") or (value == "text_time" and self._has_time_ids)
        ]
        if needs_width and self.projection_class_embeddings_input_dim is None:
            raise InputError(f"projection_class_embeddings_input_dim: missing, but {needs_width[0]} needs it; give it")
        if self._has_time_ids and self.addition_time_embed_dim is None:
            raise InputError("addition_time_embed_dim: missing, but addition_embed_type 'text_time' needs it; give it")
        self._check_time()

    def _check_time(self) -> None:
        if self.class_embeddings_concat and (not self.takes_labels or self.addition_embed_type is not None):
            raise InputError(
                "class_embeddings_concat: it needs a class embedding and cannot be combined with addition_embed_type"
            )
        if self.time_embedding_type == "fourier" and self.temb_channels % 2:
            raise InputError(
                f"time_embedding_dim: {self.temb_channels} is odd, but fourier needs an even number; give one"
            )
        widths = [self.block_out_channels[0]] if self.time_embedding_type == "positional" else []
        widths += [self.addition_time_embed_dim or 0] if self._has_time_ids else []
        if any(width // 2 == self.freq_shift for width in widths):
            raise InputError(f"freq_shift: {self.freq_shift} leaves no frequencies; give 0 or 1")

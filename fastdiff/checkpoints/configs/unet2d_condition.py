"""The config of a UNet2DConditionModel. Unknown options are errors, never ignored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from annotated_types import Interval, Len

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.model import Place, check_block_types
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


class StagePlan(NamedTuple):
    """The shape of a down, mid or up block."""

    name: str  # of the block in the state dict
    width: int
    layers: int  # the number of residual blocks, and of transformers if the block has any
    depths: tuple[int, ...]  # the number of blocks in each transformer; () without transformers
    heads: int
    only_cross: bool  # whether both attentions of a transformer block read the text

    @property
    def inner(self) -> int:
        """The channels inside the transformers. They are fewer than `width` if the heads do not divide it."""
        return self.width // self.heads * self.heads


@dataclass(frozen=True)
class UNet2DConditionConfig(DenoiserConfig):
    """The config of a UNet2DConditionModel, with diffusers' option names and defaults."""

    sample_size: Side | tuple[Side, Side] | None = None  # height and width of the latents; the default size to draw
    in_channels: Channels = 4
    out_channels: Channels = 4
    center_input_sample: bool = False  # map the input from [0, 1] to [-1, 1]
    flip_sin_to_cos: bool = True
    freq_shift: FrequencyShift = 0
    down_block_types: BlockTypes = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    mid_block_type: Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"] | None = "UNetMidBlock2DCrossAttn"
    up_block_types: BlockTypes = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
    only_cross_attention: bool | LevelFlags = False
    block_out_channels: Widths = (320, 640, 1280, 1280)
    layers_per_block: StageLayers | LevelLayers = 2
    downsample_padding: Literal[0, 1] = 1  # 0 pads (0, 1, 0, 1)
    mid_block_scale_factor: PositiveNumber = 1
    dropout: Fraction = 0.0  # training only
    act_fn: Activation = "silu"
    norm_num_groups: Channels = 32
    norm_eps: Fraction = 1e-5
    cross_attention_dim: Channels | Widths = 1280
    transformer_layers_per_block: Depth | Depths = 1
    reverse_transformer_layers_per_block: Depths | None = None  # of the up blocks; None: the down blocks', reversed
    encoder_hid_dim: Channels | None = None  # text width, if the model projects it to cross_attention_dim
    encoder_hid_dim_type: Literal["text_proj"] | None = None
    attention_head_dim: Channels | Widths = 8  # the NUMBER of heads, despite its name
    num_attention_heads: NotGiven = None  # an error in diffusers too: attention_head_dim is the number of heads
    dual_cross_attention: Off = False
    use_linear_projection: bool = False  # the transformers' projections are linear layers, not convolutions
    class_embed_type: Literal["timestep", "identity", "projection", "simple_projection"] | None = None
    addition_embed_type: Literal["text", "text_time"] | None = None
    addition_time_embed_dim: Channels | None = None
    # Rows of the label table, with class_embed_type None
    num_class_embeds: Annotated[int, Interval(ge=1, le=MAX_LABELS)] | None = None
    upcast_attention: bool | None = False  # no effect: attention scores are always float32
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    resnet_skip_time_act: Off = False
    resnet_out_scale_factor: PositiveNumber = 1.0  # of unsupported blocks
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
    mid_block_only_cross_attention: bool | None = None  # of unsupported blocks
    cross_attention_norm: NotGiven = None
    addition_embed_type_num_heads: Channels = 64

    def check(self) -> None:
        self._check_levels()
        self._check_depths()
        self._check_text()
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
    def cross_width(self) -> int:
        """The channels of the text as the transformers read it, after any projection."""
        dims = _per_level(self.cross_attention_dim, len(self.block_out_channels))
        down, up = (list(map(_is_cross, kinds)) for kinds in (self.down_block_types, reversed(self.up_block_types)))
        used = {dim for dim, *crosses in zip(dims, down, up, strict=True) if any(crosses)}
        used |= {dims[-1]} if self.mid_block_type == "UNetMidBlock2DCrossAttn" else set()
        if len(used) > 1:
            raise InputError(
                f"cross_attention_dim: all transformers read the same text, so {sorted(used)} must be one width"
            )
        if not used:
            raise InputError("down_block_types, up_block_types: no block reads a text; give a CrossAttn block")
        return used.pop()

    @property
    def down_stages(self) -> list[StagePlan]:
        depths = _per_level(self.transformer_layers_per_block, len(self.block_out_channels))
        return self._stages("down_blocks", self.down_block_types, range(len(self.block_out_channels)), depths, 0)

    @property
    def up_stages(self) -> list[StagePlan]:
        levels = range(len(self.block_out_channels))[::-1]
        depths = self.reverse_transformer_layers_per_block
        if depths is None:
            depths = _per_level(self.transformer_layers_per_block, len(levels))[::-1]
        return self._stages("up_blocks", self.up_block_types, levels, depths, 1)

    @property
    def mid_stage(self) -> StagePlan | None:
        if self.mid_block_type is None:
            return None
        levels = len(self.block_out_channels)
        depth = _per_level(self.transformer_layers_per_block, levels)[-1]
        depths = _each(depth, 1)[:1] if self.mid_block_type == "UNetMidBlock2DCrossAttn" else ()
        heads = _per_level(self.attention_head_dim, levels)[-1]
        return StagePlan("mid_block", self.block_out_channels[-1], 1, depths, heads, only_cross=False)

    @property
    def prompt_shapes(self) -> dict[str, tuple[int, ...]]:
        """See DenoiserConfig. text_embeds and time_ids are entries of added_cond_kwargs."""
        shapes: dict[str, tuple[int, ...]] = {"encoder_hidden_states": (USUAL_LENGTH, self.text_width)}
        if self._has_time_ids:
            of_ids = TIME_IDS * (self.addition_time_embed_dim or 0)
            shapes |= {"text_embeds": ((self.projection_class_embeddings_input_dim or 0) - of_ids,)}
            shapes |= {"time_ids": (TIME_IDS,)}
        return shapes

    @property
    def size_factor(self) -> int:
        return 1  # odd sizes round up when halved, and upsampling takes the skip connection's size

    @property
    def min_size(self) -> int:
        """The smallest height and width. With downsample_padding 0, halving rounds down."""
        return 1 if self.downsample_padding else 2 ** (len(self.block_out_channels) - 1)

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return (height, width) at each level, for a sample of this size."""
        odd = self.downsample_padding  # halving rounds up with padding 1, down with padding 0
        found = [(height, width)]
        for _ in self.block_out_channels[1:]:
            height, width = (height + odd) // 2, (width + odd) // 2
            found.append((height, width))
        return found

    def residual_shapes(self, height: int, width: int) -> list[tuple[int, int, int]]:
        """Return (C, H, W) of each skip connection, then of the mid block's output, for a sample of this size."""
        sizes = self.sizes(height, width)
        shapes = [(self.block_out_channels[0], *sizes[0])]
        for i, stage in enumerate(self.down_stages):
            shapes += [(stage.width, *sizes[i])] * stage.layers
            shapes += [(stage.width, *size) for size in sizes[i + 1 : i + 2]]
        return [*shapes, (self.block_out_channels[-1], *sizes[-1])]

    def attended(self, height: int, width: int, text_length: int) -> set[int]:
        """Return the numbers of keys that attn1 of the transformer blocks reads, for a sample of this size."""
        sizes = self.sizes(height, width)
        mid = [self.mid_stage] if self.mid_stage is not None else []
        placed = [*zip(self.down_stages, sizes, strict=True), *zip(self.up_stages, sizes[::-1], strict=True)]
        placed += [(stage, sizes[-1]) for stage in mid]
        return {text_length if stage.only_cross else h * w for stage, (h, w) in placed if any(stage.depths)}

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
        for stage in self._all_stages():
            for layer, depth in enumerate(stage.depths):
                blocks = f"{stage.name}.attentions.{layer}.transformer_blocks."
                found[f"transformer_layers_per_block of {stage.name}, layer {layer},"] = Place(blocks, None, depth)
                found[f"cross_attention_dim at {blocks}"] = Place(f"{blocks}0.attn2.to_k.weight", 1, self.cross_width)
        return found | {option: Place(key, axis, size) for option, (key, axis, size, _) in self._layers.items()}

    @property
    def least_parameters(self) -> dict[str, int]:
        first, stages = self.block_out_channels[0], self.down_stages
        return {
            "block_out_channels": 9 * sum(stage.width**2 for stage in stages),
            "layers_per_block": 9 * sum(stage.layers * stage.width**2 for stage in stages),
            "transformer_layers_per_block": 16 * sum(sum(each.depths) * each.inner**2 for each in self._all_stages()),
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
            found["encoder_hid_dim"] = ("encoder_hid_proj.weight", 1, self.encoder_hid_dim, self.cross_width)
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

    def _stages(
        self, blocks: str, kinds: tuple[str, ...], levels: range, depths: tuple[int | tuple[int, ...], ...], more: int
    ) -> list[StagePlan]:
        """Return the stages of `levels`, each with `more` layers on top of layers_per_block."""
        count = len(levels)
        heads, layers = (_per_level(each, count) for each in (self.attention_head_dim, self.layers_per_block))
        flags = _per_level(self.only_cross_attention, count)
        return [
            StagePlan(
                name=f"{blocks}.{i}",
                width=self.block_out_channels[level],
                layers=layers[level] + more,
                depths=_each(depths[i], layers[level] + more) if _is_cross(kinds[i]) else (),
                heads=heads[level],
                only_cross=flags[level],
            )
            for i, level in enumerate(levels)
        ]

    def _all_stages(self) -> Iterator[StagePlan]:
        yield from self.down_stages
        if self.mid_stage is not None:
            yield self.mid_stage
        yield from self.up_stages

    def _check_levels(self) -> None:
        for name, kinds, known in (
            ("down_block_types", self.down_block_types, ("CrossAttnDownBlock2D", "DownBlock2D")),
            ("up_block_types", self.up_block_types, ("CrossAttnUpBlock2D", "UpBlock2D")),
        ):
            check_block_types(name, kinds, known)
        levels = len(self.block_out_channels)
        for name in (
            "down_block_types",
            "up_block_types",
            "only_cross_attention",
            "layers_per_block",
            "cross_attention_dim",
            "transformer_layers_per_block",
            "reverse_transformer_layers_per_block",
            "attention_head_dim",
        ):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != levels:
                raise InputError(f"{name}: {len(value)} given for {levels} block_out_channels; give one for each")

    def _check_depths(self) -> None:
        depths, reverse = self.transformer_layers_per_block, self.reverse_transformer_layers_per_block
        if isinstance(depths, tuple) and reverse is None and any(isinstance(depth, tuple) for depth in depths):
            raise InputError(
                "reverse_transformer_layers_per_block: missing, but transformer_layers_per_block has lists; give it"
            )
        for stage in self._all_stages():
            if stage.depths and len(stage.depths) != stage.layers:
                raise InputError(
                    "transformer_layers_per_block, reverse_transformer_layers_per_block: "
                    f"{len(stage.depths)} given for the {stage.layers} layers of {stage.name}; give one for each"
                )
            if stage.depths and stage.heads > stage.width:
                raise InputError(f"attention_head_dim: {stage.heads} heads for {stage.width} channels; give fewer")

    def _check_text(self) -> None:
        if self.encoder_hid_dim_type is not None and self.encoder_hid_dim is None:
            raise InputError(
                f"encoder_hid_dim: missing, but encoder_hid_dim_type {self.encoder_hid_dim_type} needs it; give it"
            )
        heads, width = self.addition_embed_type_num_heads, self.text_width
        if self.addition_embed_type == "text" and width % heads:
            raise InputError(f"addition_embed_type_num_heads: {heads} does not divide the text's {width} channels")

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


def _is_cross(kind: str) -> bool:
    return kind.startswith("CrossAttn")


def _per_level(value, levels: int) -> tuple:
    """Return an option's value for each level; a single value is for all levels."""
    return value if isinstance(value, tuple) else (value,) * levels


def _each(depth: int | tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the depth of each layer of a level; a single value is for all layers."""
    return depth if isinstance(depth, tuple) else (depth,) * layers

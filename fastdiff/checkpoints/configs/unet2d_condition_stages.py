"""The stages of a text U-Net as its config describes them: what a block consists of, and the sizes of its samples."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.model import check_block_types
from fastdiff.errors import InputError

OLD_PREFIX = "UNetRes"  # of block types in early models


class Block(NamedTuple):
    """The contents of a block type, besides residual blocks."""

    attention: Literal["transformer", "plain", "added", "k"] | None = None
    # "conv": a convolution. "resnet": a residual block. "fir": a filter, in K blocks
    resample: Literal["conv", "resnet", "fir"] = "conv"

    @property
    def reads_text(self) -> bool:
        return self.attention in ("transformer", "added", "k")


DOWN_BLOCKS = {
    "CrossAttnDownBlock2D": Block("transformer"),
    "DownBlock2D": Block(),
    "AttnDownBlock2D": Block("plain"),
    "ResnetDownsampleBlock2D": Block(None, "resnet"),
    "SimpleCrossAttnDownBlock2D": Block("added", "resnet"),
    "KDownBlock2D": Block(None, "fir"),
    "KCrossAttnDownBlock2D": Block("k", "fir"),
}
UP_BLOCKS = {
    "CrossAttnUpBlock2D": Block("transformer"),
    "UpBlock2D": Block(),
    "AttnUpBlock2D": Block("plain"),
    "ResnetUpsampleBlock2D": Block(None, "resnet"),
    "SimpleCrossAttnUpBlock2D": Block("added", "resnet"),
    "KUpBlock2D": Block(None, "fir"),
    "KCrossAttnUpBlock2D": Block("k", "fir"),
}
MID_BLOCKS = {
    "UNetMidBlock2DCrossAttn": Block("transformer"),
    "UNetMidBlock2DSimpleCrossAttn": Block("added", "resnet"),
    "UNetMidBlock2D": Block(),
}


class StagePlan(NamedTuple):
    """The shape of a down, mid or up block."""

    name: str  # of the block in the state dict
    block: Block
    width: int
    layers: int  # the number of residual blocks, and of attentions if the block has any
    depths: tuple[int, ...]  # the number of blocks in each transformer; () without transformers
    heads: int  # of a transformer
    head_dim: int  # channels of a head in other attentions
    only_cross: bool  # whether all attentions read the text alone
    self_attention: bool = False  # in K blocks: an attention to the pixels before the attention to the text

    @property
    def inner(self) -> int:
        """The channels inside the transformers. They are fewer than `width` if the heads do not divide it."""
        return self.width // self.heads * self.heads


class StagedConfig(DenoiserConfig):
    """The part of a text U-Net's config that describes its stages."""

    down_block_types: tuple[str, ...]
    mid_block_type: str | None
    up_block_types: tuple[str, ...]
    block_out_channels: tuple[int, ...]
    layers_per_block: int | tuple[int, ...]
    only_cross_attention: bool | tuple[bool, ...]
    mid_block_only_cross_attention: bool | None
    downsample_padding: int
    cross_attention_dim: int | tuple[int, ...]
    cross_attention_norm: str | None
    transformer_layers_per_block: Any
    reverse_transformer_layers_per_block: Any
    attention_head_dim: int | tuple[int, ...]
    norm_num_groups: int | None

    @property
    def block_temb_channels(self) -> int:
        """The width of the embedding that blocks read."""
        raise NotImplementedError

    @property
    def down_kinds(self) -> tuple[Block, ...]:
        return _kinds(self.down_block_types, DOWN_BLOCKS)

    @property
    def up_kinds(self) -> tuple[Block, ...]:
        return _kinds(self.up_block_types, UP_BLOCKS)

    @property
    def has_k_blocks(self) -> bool:
        return any(block.resample == "fir" for block in self.down_kinds + self.up_kinds)

    @property
    def cross_width(self) -> int:
        """The channels of the text as the attentions read it, after any projection."""
        dims = per_level(self.cross_attention_dim, len(self.block_out_channels))
        pairs = zip(dims, self.down_kinds, reversed(self.up_kinds), strict=True)
        used = {dim for dim, down, up in pairs if down.reads_text or up.reads_text}
        if self.mid_block_type is not None and MID_BLOCKS[self.mid_block_type].reads_text:
            used.add(dims[-1])
        if len(used) > 1:
            raise InputError(
                f"cross_attention_dim: all attentions read the same text, so {sorted(used)} must be one width"
            )
        if not used:
            raise InputError("down_block_types, up_block_types: no block reads a text; give a CrossAttn block")
        return used.pop()

    @property
    def down_stages(self) -> list[StagePlan]:
        levels = range(len(self.block_out_channels))
        depths = per_level(self.transformer_layers_per_block, len(levels))
        stages = self._stages("down_blocks", self.down_kinds, levels, depths, 0)
        return [*stages[:-1], stages[-1]._replace(self_attention=True)]

    @property
    def up_stages(self) -> list[StagePlan]:
        levels = range(len(self.block_out_channels))[::-1]
        depths = self.reverse_transformer_layers_per_block
        if depths is None:
            depths = per_level(self.transformer_layers_per_block, len(levels))[::-1]
        stages = self._stages("up_blocks", self.up_kinds, levels, depths, 1)
        return [stage._replace(self_attention=self._is_first_k(i)) for i, stage in enumerate(stages)]

    @property
    def mid_stage(self) -> StagePlan | None:
        if self.mid_block_type is None:
            return None
        levels, block = len(self.block_out_channels), MID_BLOCKS[self.mid_block_type]
        depth = per_level(self.transformer_layers_per_block, levels)[-1]
        heads = per_level(self.attention_head_dim, levels)[-1]
        only = self.mid_block_only_cross_attention
        if only is None:
            only = self.only_cross_attention if isinstance(self.only_cross_attention, bool) else False
        return StagePlan(
            name="mid_block",
            block=block,
            width=self.block_out_channels[-1],
            layers=1,
            depths=_each(depth, 1)[:1] if block.attention == "transformer" else (),
            heads=heads,
            head_dim=heads,
            only_cross=only and block.attention == "added",
        )

    def all_stages(self) -> Iterator[StagePlan]:
        yield from self.down_stages
        if self.mid_stage is not None:
            yield self.mid_stage
        yield from self.up_stages

    def reads_skip(self, i: int) -> bool:
        """Whether the first residual block of the K up block `i` reads a skip connection."""
        return self.up_kinds[i].attention != "k" or not self._is_first_k(i)

    @property
    def size_factor(self) -> int:
        """Height and width must be multiples of this number.

        UpBlock2D and CrossAttnUpBlock2D upsample to the size of the skip connection. The other blocks double it, so the
        sizes at their levels must be even.
        """
        levels = len(self.block_out_channels)
        doubling = [levels - 1 - i for i, kind in enumerate(self.up_kinds[:-1]) if not _fits_any_size(kind)]
        return 2 ** max(doubling, default=0)

    @property
    def min_size(self) -> int:
        """The smallest height and width. K blocks pad by reflection, which needs two pixels."""
        rounds_down = any(not self._rounds_up(i) for i in range(len(self.block_out_channels) - 1))
        least = 2 ** (len(self.block_out_channels) - 1) if rounds_down else 1
        return 2 * least if self.has_k_blocks else max(least, self.size_factor)

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return (height, width) at each level, for a sample of this size."""
        found = [(height, width)]
        for i in range(len(self.block_out_channels) - 1):
            odd = int(self._rounds_up(i))
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
        """Return the numbers of keys that `attention_mask` covers, for a sample of this size.

        It covers attn1 of transformers and of K blocks, and the text in the attentions of SimpleCrossAttn blocks.
        """
        sizes = self.sizes(height, width)
        mid = [self.mid_stage] if self.mid_stage is not None else []
        placed = [*zip(self.down_stages, sizes, strict=True), *zip(self.up_stages, sizes[::-1], strict=True)]
        placed += [(stage, sizes[-1]) for stage in mid]
        keys = set()
        for stage, (h, w) in placed:
            if stage.block.attention == "added" or (any(stage.depths) and stage.only_cross):
                keys.add(text_length)
            elif any(stage.depths) or (stage.block.attention == "k" and stage.self_attention):
                keys.add(h * w)
        return keys

    def _rounds_up(self, level: int) -> bool:
        """Whether an odd size is rounded up, not down, between this level and the next."""
        return self.down_kinds[level].resample == "conv" and self.downsample_padding == 1

    def _is_first_k(self, i: int) -> bool:
        """Whether the up block `i` is a KCrossAttnUpBlock2D without a skip connection; the rule is diffusers'."""
        widths = self.block_out_channels[::-1]
        above = widths[min(i + 1, len(widths) - 1)]
        return self.up_kinds[i].attention == "k" and above == widths[i] == self.block_temb_channels

    def _stages(
        self, blocks: str, kinds: tuple[Block, ...], levels: range, depths: tuple[int | tuple[int, ...], ...], more: int
    ) -> list[StagePlan]:
        """Return the stages of `levels`, each with `more` layers on top of layers_per_block."""
        count = len(levels)
        heads, layers = (per_level(each, count) for each in (self.attention_head_dim, self.layers_per_block))
        flags = per_level(self.only_cross_attention, count)
        stages = []
        for i, level in enumerate(levels):
            number = layers[level] + (0 if kinds[i].resample == "fir" else more)
            stages.append(
                StagePlan(
                    name=f"{blocks}.{i}",
                    block=kinds[i],
                    width=self.block_out_channels[level],
                    layers=number,
                    depths=_each(depths[i], number) if kinds[i].attention == "transformer" else (),
                    heads=heads[level],
                    head_dim=heads[i],  # diffusers does not reverse it for the up blocks
                    only_cross=flags[level],
                )
            )
        return stages

    def check_stages(self) -> None:
        """Raise InputError for options that do not describe stages."""
        self._check_levels()
        self._check_k_blocks()
        self._check_attentions()

    def _check_levels(self) -> None:
        for name, kinds, known in (
            ("down_block_types", self.down_block_types, DOWN_BLOCKS),
            ("up_block_types", self.up_block_types, UP_BLOCKS),
        ):
            check_block_types(name, (kind.removeprefix(OLD_PREFIX) for kind in kinds), list(known))
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

    def _check_k_blocks(self) -> None:
        families = {block.resample == "fir" for block in self.down_kinds + self.up_kinds}
        if len(families) > 1:
            raise InputError("down_block_types, up_block_types: K blocks cannot be combined with others; use K blocks")
        if families == {False}:
            if self.norm_num_groups is None:
                raise InputError("norm_num_groups: null works with K blocks only; give a number")
            return
        levels = len(self.block_out_channels)
        written = [level < levels - 1 or kind.attention is None for level, kind in enumerate(self.down_kinds)]
        if [self.reads_skip(i) for i in range(levels)] != written[::-1]:
            raise InputError(
                "down_block_types, up_block_types: an up block reads a skip connection that its down block does not "
                "write, or the reverse; see diffusers' KCrossAttnUpBlock2D, which compares its widths with the time "
                "embedding's"
            )

    def _check_attentions(self) -> None:
        depths, reverse = self.transformer_layers_per_block, self.reverse_transformer_layers_per_block
        if isinstance(depths, tuple) and reverse is None and any(isinstance(depth, tuple) for depth in depths):
            raise InputError(
                "reverse_transformer_layers_per_block: missing, but transformer_layers_per_block has lists; give it"
            )
        for stage in self.all_stages():
            if stage.depths and len(stage.depths) != stage.layers:
                raise InputError(
                    "transformer_layers_per_block, reverse_transformer_layers_per_block: "
                    f"{len(stage.depths)} given for the {stage.layers} layers of {stage.name}; give one for each"
                )
            if stage.depths and stage.heads > stage.width:
                raise InputError(f"attention_head_dim: {stage.heads} heads for {stage.width} channels; give fewer")
            self._check_head_dim(stage)

    def _check_head_dim(self, stage: StagePlan) -> None:
        kind, dim = stage.block.attention, stage.head_dim
        # the last attention of a K up block has the width of the level above
        narrowest = min(self.block_out_channels) if kind == "k" else stage.width
        if kind in ("plain", "k") and dim > narrowest:
            raise InputError(f"attention_head_dim: {dim} for {narrowest} channels; give a smaller number")
        if kind == "added" and stage.width % dim:
            raise InputError(
                f"attention_head_dim: {dim} does not divide the {stage.width} channels of {stage.name}; give a divisor"
            )
        if kind == "added" and self.cross_attention_norm == "layer_norm" and stage.width != self.cross_width:
            raise InputError(
                f"cross_attention_norm: layer_norm works only where block_out_channels equals the text's "
                f"{self.cross_width} channels; use group_norm"
            )


def _kinds(names: tuple[str, ...], known: Mapping[str, Block]) -> tuple[Block, ...]:
    return tuple(known[name.removeprefix(OLD_PREFIX)] for name in names)


def _fits_any_size(kind: Block) -> bool:
    return kind.resample == "conv" and kind.attention != "plain"


def per_level(value: Any, levels: int) -> tuple[Any, ...]:
    """Return an option's value for each level; a single value is for all levels."""
    return value if isinstance(value, tuple) else (value,) * levels


def _each(depth: int | tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the depth of each layer of a level; a single value is for all layers."""
    return depth if isinstance(depth, tuple) else (depth,) * layers

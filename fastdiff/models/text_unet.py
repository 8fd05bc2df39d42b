"""Build the parts of a UNet2DConditionModel from its config."""

from dataclasses import replace

from torch import nn

from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.models.blocks.embeddings import (
    GaussianFourierProjection,
    ImageHintTimeEmbedding,
    ImageProjection,
    ImageTimeEmbedding,
    TextImageProjection,
    TextImageTimeEmbedding,
    TextTimeEmbedding,
    TimestepEmbedding,
    Timesteps,
)
from fastdiff.models.blocks.resnet import BlockOptions
from fastdiff.models.blocks.text_stages import (
    KTextDownBlock2D,
    KTextUpBlock2D,
    TextBlockOptions,
    TextDownBlock2D,
    TextMidBlock2D,
    TextStage,
    TextUpBlock2D,
)


def activation(name: str | None) -> str | None:
    """Return the canonical name of an activation."""
    return "silu" if name == "swish" else name


def block_options(config: UNet2DConditionConfig) -> TextBlockOptions:
    resnets = BlockOptions(
        temb_channels=config.block_temb_channels,
        eps=config.norm_eps,
        activation=config.activation,
        scale_shift=config.resnet_time_scale_shift == "scale_shift",
        num_groups=config.norm_num_groups,
        head_dim=None,
        downsample_padding=config.downsample_padding,
    )
    return TextBlockOptions(
        resnets,
        linear_projection=config.use_linear_projection,
        text_width=config.cross_width,
        cross_norm=config.cross_attention_norm,
        raw_temb=config.resnet_skip_time_act,
        output_scale=config.resnet_out_scale_factor,
    )


def text_projection(config: UNet2DConditionConfig) -> nn.Module | None:
    given, width = config.encoder_hid_dim, config.cross_width
    if given is None:
        return None
    if config.encoder_hid_dim_type == "image_proj":
        return ImageProjection(given, width)
    if config.encoder_hid_dim_type == "text_image_proj":
        return TextImageProjection(given, width, width)
    return nn.Linear(given, width)


def time_projection(config: UNet2DConditionConfig) -> tuple[nn.Module, int]:
    """Return the module that embeds a timestep, and the width of its output."""
    if config.time_embedding_type == "fourier":
        half = config.temb_channels // 2
        module = GaussianFourierProjection(half, scale=1.0, log=False, flip_sin_to_cos=config.flip_sin_to_cos)
        return module, config.temb_channels
    width = config.block_out_channels[0]
    return Timesteps(width, config.flip_sin_to_cos, config.freq_shift), width


def class_embedding(config: UNet2DConditionConfig, time_width: int) -> nn.Module | None:
    width, out = config.projection_class_embeddings_input_dim or 0, config.temb_channels
    if config.class_embed_type is None:
        return None if config.num_class_embeds is None else nn.Embedding(config.num_class_embeds, out)
    if config.class_embed_type == "timestep":
        return TimestepEmbedding(time_width, out, activation=config.activation)
    if config.class_embed_type == "projection":
        return TimestepEmbedding(width, out)
    return nn.Linear(width, out) if config.class_embed_type == "simple_projection" else nn.Identity()


def add_embedding(config: UNet2DConditionConfig) -> nn.Module | None:
    if config.addition_embed_type == "text":
        return TextTimeEmbedding(config.text_width, config.temb_channels, config.addition_embed_type_num_heads)
    if config.addition_embed_type == "text_time" and config.projection_class_embeddings_input_dim is not None:
        return TimestepEmbedding(config.projection_class_embeddings_input_dim, config.temb_channels)
    if config.addition_embed_type == "text_image":
        return TextImageTimeEmbedding(config.cross_width, config.temb_channels)
    kind = {"image": ImageTimeEmbedding, "image_hint": ImageHintTimeEmbedding}.get(str(config.addition_embed_type))
    return None if kind is None else kind(config.image_width or 0, config.temb_channels)


def down_blocks(config: UNet2DConditionConfig, options: TextBlockOptions) -> list[TextStage]:
    stages = config.down_stages
    befores = (config.block_out_channels[0], *config.block_out_channels)
    kind = KTextDownBlock2D if config.has_k_blocks else TextDownBlock2D
    return [kind(stage, befores[i], options, downsample=i < len(stages) - 1) for i, stage in enumerate(stages)]


def mid_block(config: UNet2DConditionConfig, options: TextBlockOptions) -> TextMidBlock2D | None:
    if config.mid_stage is None:
        return None
    groups = config.norm_num_groups or min(config.mid_stage.width // 4, 32)
    options = options._replace(resnets=replace(options.resnets, num_groups=groups))
    return TextMidBlock2D(config.mid_stage, options, scale=config.mid_block_scale_factor)


def up_blocks(config: UNet2DConditionConfig, options: TextBlockOptions) -> list[TextStage]:
    stages, blocks = config.up_stages, list[TextStage]()
    last = len(stages) - 1
    for i, stage in enumerate(stages):
        before, above = stages[max(i - 1, 0)].width, stages[min(i + 1, last)].width
        if config.has_k_blocks:
            skip = config.reads_skip(i)
            blocks.append(KTextUpBlock2D(stage, above, options, reads_skip=skip, upsample=i < last))
        else:
            blocks.append(TextUpBlock2D(stage, before, above, options, upsample=i < last))
    return blocks

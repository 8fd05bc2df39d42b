"""UNet2DModel: the denoiser of DDPM and of models like it, with diffusers' config.json and weights."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.errors import InputError
from fastdiff.execution.devices import on_meta
from fastdiff.models.blocks.conditioning import Conditioning
from fastdiff.models.blocks.embeddings import GaussianFourierProjection, TimestepEmbedding, Timesteps, each_through
from fastdiff.models.blocks.layers import ACTIVATIONS, Conv2d, Feature, GroupNorm
from fastdiff.models.blocks.resnet import BlockOptions
from fastdiff.models.blocks.stages import (
    DownBlock2D,
    DownStage,
    KDownBlock2D,
    KUpBlock2D,
    MidBlock2D,
    SkipDownBlock2D,
    SkipUpBlock2D,
    UpBlock2D,
    UpStage,
)
from fastdiff.models.denoiser import Denoiser
from fastdiff.models.model import takes_options
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked


@read_by_name
class UNet2DOutput(NamedTuple):
    """The output of a UNet2DModel.

    `sample` is (N, C_out, H, W), the prediction: noise, picture or velocity, according to the scheduler's config.
    """

    sample: Tensor


class UNet2DModel(Denoiser):
    """The U-Net of DDPM and of models like it, conditioned on time and optionally on class labels.

    It takes the config, weights and call of diffusers' UNet2DModel, for inference only. See Model for how to build
    it. ::

        model = UNet2DModel.from_pretrained("emoji64", device="cuda", dtype=torch.bfloat16)
        prediction = model(sample, timestep, class_labels).sample
    """

    config: UNet2DConfig
    whole = ("conv_in.", "conv_out.", "time_embedding.", "class_embedding.")
    part = registry.UNET

    @takes_options
    def __init__(self, config: UNet2DConfig):
        super().__init__(config)
        first = config.block_out_channels[0]
        temb_channels = config.temb_channels
        options = BlockOptions(
            temb_channels=temb_channels,
            eps=config.norm_eps,
            activation=config.activation,
            scale_shift=config.resnet_time_scale_shift == "scale_shift",
            num_groups=config.norm_num_groups,
            head_dim=config.attention_head_dim,
            downsample_padding=config.downsample_padding,
        )
        self.conv_in = Conv2d(config.in_channels, first, 3)
        self.time_proj, time_width = _time_projection(config)
        self.time_embedding = TimestepEmbedding(time_width, temb_channels)
        self.class_embedding = _class_embedding(config, time_width, temb_channels)
        self.down_blocks = nn.ModuleList(_down_stages(config, options))
        self.mid_block = _mid_block(config, options)
        self.up_blocks = nn.ModuleList(_up_stages(config, options))
        groups_out = config.norm_num_groups or min(first // 4, 32)
        self.conv_norm_out = GroupNorm(groups_out, first, eps=config.norm_eps)
        self.conv_out = Conv2d(first, config.out_channels, 3)

        self.time_emb_proj = self._stack_projections("time_emb_proj.", temb_channels)
        self.ada_group_norm = self._stack_projections("ada_group_norm.", temb_channels, raw=True)
        self._lay_out()

    def _check_built(self, source: str) -> None:
        if self.config.has_k_blocks and not _fits_together(self.config):
            raise InputError(f"{source}: down_block_types and up_block_types do not fit together; use K blocks only")

    def forward(
        self, sample: Tensor, timestep: Tensor | float, class_labels: Tensor | None = None, return_dict: bool = True
    ) -> UNet2DOutput | tuple[Tensor]:
        """Predict at one timestep. Arguments and output match diffusers' model.

        Args:
            sample: (N, C_in, H, W) in the model's dtype, on its device. H and W are multiples of 2 ** (levels - 1).
            timestep: a number, or a tensor of one or N timesteps. A number is truncated to an integer, as in diffusers.
            class_labels: None for an unconditional model. With a label table (N,) int64; with class_embed_type
                `timestep` (N,); with `identity` (N, time_embedding_dim).
            return_dict: whether to return a UNet2DOutput instead of a tuple.

        Returns:
            UNet2DOutput whose `sample` is (N, C_out, H, W), or a tuple of it.

        Raises:
            InputError: for an argument that the model does not take.
        """
        checked("return_dict", return_dict, bool)
        prediction = self._run(sample, timestep, class_labels)
        return UNet2DOutput(prediction) if return_dict else (prediction,)

    @torch.no_grad()
    def conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        self._check_labels(len(timesteps), class_labels)
        emb = self.time_embedding(self.time_proj(timesteps).to(self.dtype))
        if class_labels is not None and self.class_embedding is not None:
            if self.config.class_embed_type == "timestep":
                class_labels = self.time_proj(class_labels).to(self.dtype)
            emb = emb + self.class_embedding(class_labels).to(self.dtype)
        activated = ACTIVATIONS[self.config.activation](emb)
        pairs = ((activated, self.time_emb_proj), (emb, self.ada_group_norm))
        columns = [each_through(each, layer) for each, layer in pairs if layer is not None]
        return Conditioning(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0], timesteps)

    @torch.no_grad()
    def predict(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        temb = conditioning.temb.expand(len(x), -1)
        x = 2 * x - 1 if self.config.center_input_sample else x
        rgb: Feature | None = Feature(x)
        x = self.conv_in(rgb)

        skips = [x]
        for block in self.down_blocks:
            x, stage_skips, rgb = block(x, temb, rgb)
            skips += stage_skips

        if self.mid_block is not None:
            x = self.mid_block(x, temb)

        rgb = None
        for block in self.up_blocks:
            x, rgb = block(x, skips, temb, rgb)

        x = self.conv_out(self.conv_norm_out(x, activation="silu"), residual=rgb, moments=False).x
        if self.config.time_embedding_type == "fourier":
            x = x / conditioning.timesteps.view(-1, 1, 1, 1).to(x.dtype)
        return x


def _fits_together(config: UNet2DConfig) -> bool:
    """Try a forward on the meta device: the widths and skip connections of K blocks follow rules of their own."""
    with on_meta():
        model = UNet2DModel(config)
        x = torch.empty(1, config.min_size, config.min_size, config.in_channels)
        temb = torch.empty(1, model.conditioning_width)
        try:
            model.predict(x, Conditioning(temb, torch.ones(1)))
        except (ValueError, RuntimeError, IndexError):
            return False
        return True


def _time_projection(config: UNet2DConfig) -> tuple[nn.Module, int]:
    """Return the module that embeds a timestep, and the width of its output."""
    width = config.block_out_channels[0]
    if config.time_embedding_type == "fourier":
        return GaussianFourierProjection(width), 2 * width
    if config.time_embedding_type == "learned" and config.num_train_timesteps is not None:
        return nn.Embedding(config.num_train_timesteps, width), width
    return Timesteps(width, config.flip_sin_to_cos, config.freq_shift), width


def _class_embedding(config: UNet2DConfig, time_width: int, temb_channels: int) -> nn.Module | None:
    if config.class_embed_type == "timestep":
        return TimestepEmbedding(time_width, temb_channels)
    if config.class_embed_type == "identity":
        return nn.Identity()
    return nn.Embedding(config.num_class_embeds, temb_channels) if config.num_class_embeds is not None else None


def _down_stages(config: UNet2DConfig, options: BlockOptions) -> list[DownStage]:
    stages: list[DownStage] = []
    widths = (config.block_out_channels[0], *config.block_out_channels)
    for i, kind in enumerate(config.down_kinds):
        layers = [widths[i]] + [widths[i + 1]] * config.layers_per_block
        resample, attention = i < len(config.down_kinds) - 1, kind.startswith("Attn")
        stage: DownStage
        if kind == "KDownBlock2D":
            stage = KDownBlock2D(layers, options, resample=resample)
        elif kind in ("SkipDownBlock2D", "AttnSkipDownBlock2D"):
            stage = SkipDownBlock2D(layers, options, attention=attention, resample=resample)
        else:
            how = {"AttnDownBlock2D": config.downsample_type or "conv", "ResnetDownsampleBlock2D": "resnet"}.get(
                kind, "conv"
            )
            stage = DownBlock2D(layers, options, attention=attention, resample=how if resample else None)
        stages.append(stage)
    return stages


def _up_stages(config: UNet2DConfig, options: BlockOptions) -> list[UpStage]:
    stages: list[UpStage] = []
    widths = tuple(reversed(config.block_out_channels))
    for i, kind in enumerate(config.up_kinds):
        before, out, above = widths[max(i - 1, 0)], widths[i], widths[min(i + 1, len(widths) - 1)]
        # Each residual block reads its input and a skip connection of the mirrored down stage.
        layers = config.layers_per_block
        inputs = list(zip([before] + [out] * layers, [out] * layers + [above], strict=True))
        resample, attention = i < len(config.up_kinds) - 1, kind.startswith("Attn")
        stage: UpStage
        if kind == "KUpBlock2D":
            stage = KUpBlock2D(out, above, layers, options, resample=resample)
        elif kind in ("SkipUpBlock2D", "AttnSkipUpBlock2D"):
            stage = SkipUpBlock2D(inputs, out, options, attention=attention, resample=resample)
        else:
            how = {"AttnUpBlock2D": config.upsample_type or "conv", "ResnetUpsampleBlock2D": "resnet"}.get(kind, "conv")
            stage = UpBlock2D(inputs, out, options, attention=attention, resample=how if resample else None)
        stages.append(stage)
    return stages


def _mid_block(config: UNet2DConfig, options: BlockOptions) -> MidBlock2D | None:
    if config.mid_block_type is None:
        return None
    return MidBlock2D(
        config.block_out_channels[-1],
        options,
        attention_groups=config.attn_norm_num_groups,
        add_attention=config.add_attention,
        scale=config.mid_block_scale_factor,
    )

"""UNet2DConditionModel: the denoiser of Stable Diffusion, which reads a text (Rombach et al. 2022, arXiv 2112.10752).

The keys and values of every cross-attention depend on the text only, so `project_text` makes them once per prompt.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastdiff.arguments import as_float, shown
from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.errors import InputError
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans.cpu import fast_on_cpu
from fastdiff.models.blocks.conditioning import Conditioning, Prompt
from fastdiff.models.blocks.embeddings import (
    GaussianFourierProjection,
    TextTimeEmbedding,
    TimestepEmbedding,
    Timesteps,
    each_through,
)
from fastdiff.models.blocks.layers import ACTIVATIONS, Conv2d, Feature, GroupNorm
from fastdiff.models.blocks.resnet import BlockOptions, ResnetBlock2D
from fastdiff.models.blocks.text_stages import TextBlockOptions, TextDownBlock2D, TextMidBlock2D, TextUpBlock2D
from fastdiff.models.blocks.transformer import Context, stack_text_projections
from fastdiff.models.denoiser import MOST_TIMESTEP, Denoiser
from fastdiff.models.prompt import Extras, PromptCheck
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked


@read_by_name
class UNet2DConditionOutput(NamedTuple):
    """The output of a UNet2DConditionModel.

    `sample` is (N, C_out, H, W), the prediction: noise or velocity, according to the scheduler's config.
    """

    sample: Tensor


class UNet2DConditionModel(Denoiser):
    """The U-Net of Stable Diffusion 1, 2 and XL, conditioned on time and a text (Rombach et al. 2022).

    It takes the config, weights and call of diffusers' UNet2DConditionModel, for inference only. See Model for how to
    build it. ::

        model = UNet2DConditionModel.from_pretrained("emoji-sd", device="cuda", dtype=torch.bfloat16)
        prediction = model(sample, timestep, encoder_hidden_states).sample
    """

    config: UNet2DConditionConfig
    whole = (
        "conv_in.", "conv_out.", "time_embedding.", "class_embedding.", "add_embedding.", "encoder_hid_proj.",
    )  # fmt: skip
    part = registry.UNET_CONDITION
    joins_halves = True

    def __init__(self, config: UNet2DConditionConfig):
        super().__init__(config)
        first, temb_channels = config.block_out_channels[0], config.temb_channels
        options = TextBlockOptions(_resnet_options(config), config.norm_num_groups, config.use_linear_projection)
        self.conv_in = Conv2d(config.in_channels, first, config.conv_in_kernel)
        self.time_proj, time_width = _time_projection(config)
        self.time_embedding = TimestepEmbedding(
            time_width,
            temb_channels,
            activation=config.activation,
            post_activation=_activation(config.timestep_post_act),
            condition_width=config.time_cond_proj_dim,
        )
        self.encoder_hid_proj = None
        if config.encoder_hid_dim is not None:
            self.encoder_hid_proj = nn.Linear(config.encoder_hid_dim, config.cross_width)
        self.class_embedding = _class_embedding(config, time_width)
        self.add_embedding = _add_embedding(config)
        self.down_blocks = nn.ModuleList(_down_blocks(config, options))
        self.mid_block = None
        if config.mid_stage is not None:
            self.mid_block = TextMidBlock2D(config.mid_stage, options, scale=config.mid_block_scale_factor)
        self.up_blocks = nn.ModuleList(_up_blocks(config, options))
        self.conv_norm_out = GroupNorm(config.norm_num_groups, first, eps=config.norm_eps)
        self.conv_out = Conv2d(first, config.out_channels, config.conv_out_kernel)

        self.time_emb_proj = self._stack_projections("time_emb_proj.", ResnetBlock2D, config.block_temb_channels)
        self.text_projections, self.stacked["text_projections."] = stack_text_projections(self, config.cross_width)
        self._lay_out()

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor,
        class_labels: Tensor | None = None,
        timestep_cond: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cross_attention_kwargs: None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        down_block_additional_residuals: tuple[Tensor, ...] | None = None,
        mid_block_additional_residual: Tensor | None = None,
        down_intrablock_additional_residuals: None = None,
        encoder_attention_mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> UNet2DConditionOutput | tuple[Tensor]:
        """Predict at one timestep. Arguments and output are those of diffusers' model.

        Args:
            sample: (N, C_in, H, W) in the model's dtype, on its device. H and W are at least
                `config.min_size`.
            timestep: a number, or a tensor of one or N timesteps. Fractions count.
            encoder_hidden_states: the text, (N, L, text_width) in the model's dtype, on its device.
            class_labels: with a label table (N,) int64; with class_embed_type `timestep` (N,); with `identity` and
                projections (N, width). None for a model without class embedding.
            timestep_cond: (N, time_cond_proj_dim), an embedding of the guidance scale, for LCM.
            attention_mask: (N, keys) for attn1 of all blocks, 1 to keep and 0 to hide. All must have that many keys.
            cross_attention_kwargs: not supported: it must be None or empty.
            added_cond_kwargs: with addition_embed_type `text_time` (SDXL): text_embeds (N, width) and time_ids
                (N, count).
            down_block_additional_residuals: of a ControlNet, (N, C, H, W) to add to each skip connection.
            mid_block_additional_residual: of a ControlNet, (N, C, H, W) to add to the mid block's output. Give both
                kinds of residuals or none.
            down_intrablock_additional_residuals: of a T2I-Adapter; not supported: it must be None.
            encoder_attention_mask: (N, L) for the text, 1 to keep and 0 to hide.
            return_dict: whether to return a UNet2DConditionOutput instead of a tuple.

        Returns:
            UNet2DConditionOutput whose `sample` is (N, C_out, H, W), or a tuple of it.

        Raises:
            InputError: for an argument that the model does not take.
        """
        checked("return_dict", return_dict, bool)
        _check_unsupported(cross_attention_kwargs, down_intrablock_additional_residuals)
        self._check_sample(sample)
        timesteps = self._timesteps(timestep, len(sample))
        self._check_labels(timesteps, class_labels)
        check = PromptCheck(self.config, self.dtype, self.device, len(sample))
        prompt = check.prompt(encoder_hidden_states, encoder_attention_mask, added_cond_kwargs, timestep_cond)
        height, width = sample.shape[2:]
        keys = self.config.attended(height, width, prompt.text.shape[1])
        bias = check.bias("attention_mask", attention_mask, keys)
        shapes = self.config.residual_shapes(height, width)
        residuals = check.residuals(down_block_additional_residuals, mid_block_additional_residual, shapes)
        run = self.graphed("forward", self._run_prompt)
        labels = () if class_labels is None else (class_labels,)
        (prediction,) = run(self.channels_last(sample), timesteps, labels, prompt, Extras(bias, *residuals))
        prediction = self.channels_first(prediction)
        return UNet2DConditionOutput(prediction) if return_dict else (prediction,)

    def _run_prompt(
        self, x: Tensor, timesteps: Tensor, labels: tuple[Tensor, ...], prompt: Prompt, extras: Extras
    ) -> tuple[Tensor]:
        """Predict as a function of tensors only, over (N, H, W, C)."""
        conditioning = self.conditioning(timesteps, labels[0] if labels else None, prompt)
        return (self.predict(x.contiguous(), conditioning, extras),)

    @torch.no_grad()
    def conditioning(
        self, timesteps: Tensor, class_labels: Tensor | None = None, prompt: Prompt | None = None
    ) -> Conditioning:
        """Compute what depends on time, class and text only; see Denoiser. The prompt has M entries.

        A sampling loop calls `project` once per prompt instead, and `embed` for the part that depends on time.
        """
        if prompt is None:
            raise InputError("prompt: missing, but this model reads a text; give one")
        temb = self.embed(timesteps, class_labels, prompt)
        return Conditioning(temb, timesteps, (self.project_text(prompt.text), *prompt.bias))

    def project(self, prompt: Prompt) -> tuple[Tensor, ...]:
        return torch.cat([self.project_text(each[None]) for each in prompt.text]), *prompt.bias

    def usual_conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        shapes = self.config.prompt_shapes.items()
        text, *added = (
            torch.zeros(len(timesteps), *shape, dtype=self.dtype, device=self.device) for _, shape in shapes
        )
        return self.conditioning(timesteps, class_labels, Prompt(text, added=tuple(added)))

    @torch.no_grad()
    def project_text(self, text: Tensor) -> Tensor:
        """Return the keys and values of all cross-attentions, side by side: (M, L, text_width) -> (M, L, width)."""
        if self.encoder_hid_proj is not None:
            text = linear(text, self.encoder_hid_proj.weight, self.encoder_hid_proj.bias)
        return linear(text, self.text_projections.weight)

    @torch.no_grad()
    def embed(self, timesteps: Tensor, class_labels: Tensor | None, prompt: Prompt | None) -> Tensor:
        """Return what residual blocks read of time, class and added conditions: (M, conditioning_width)."""
        assert prompt is not None  # guaranteed by the callers
        self._check_labels(timesteps, class_labels)
        emb = self.time_embedding(self.time_proj(timesteps).to(self.dtype), *prompt.timestep_cond)
        if class_labels is not None:
            embedded = self._embed_labels(class_labels)
            concat = self.config.class_embeddings_concat
            emb = torch.cat([emb, embedded.expand_as(emb)], dim=1) if concat else emb + embedded
        if isinstance(self.add_embedding, TextTimeEmbedding):
            emb = emb + self.add_embedding(prompt.text)
        elif self.add_embedding is not None:
            emb = emb + self.add_embedding(self._added(*prompt.added))
        if self.config.time_embedding_act_fn is not None:
            emb = ACTIVATIONS[_activation(self.config.time_embedding_act_fn) or ""](emb)
        assert self.time_emb_proj is not None  # every model has residual blocks
        return each_through(ACTIVATIONS[self.config.activation](emb), self.time_emb_proj)

    def _embed_labels(self, labels: Tensor) -> Tensor:
        if self.config.class_embed_type == "timestep":
            labels = self.time_proj(labels)
        labels = labels if isinstance(self.class_embedding, nn.Embedding) else labels.to(self.dtype)
        if isinstance(self.class_embedding, nn.Linear):
            return each_through(labels, self.class_embedding)
        assert self.class_embedding is not None
        return self.class_embedding(labels).to(self.dtype)

    def _added(self, text_embeds: Tensor, time_ids: Tensor) -> Tensor:
        """Return SDXL's pooled text and embedded time_ids, side by side."""
        config = self.config
        assert config.addition_time_embed_dim is not None
        waves = Timesteps(config.addition_time_embed_dim, config.flip_sin_to_cos, config.freq_shift)
        embedded = waves(time_ids.flatten()).unflatten(0, time_ids.shape).flatten(1)
        return torch.cat([text_embeds.float(), embedded], dim=1).to(self.dtype)

    @torch.no_grad()
    @fast_on_cpu()
    def predict(self, x: Tensor, conditioning: Conditioning, extras: Extras | None = None) -> Tensor:
        extras = extras or Extras()
        temb, _, (text, *text_bias) = conditioning
        each = (len(x), -1)
        context = Context(
            temb.expand(*each),
            text.expand(*each, -1),
            text_bias[0].expand(*each) if text_bias else None,
            extras.bias[0] if extras.bias else None,
        )
        feature = self.conv_in(Feature(2 * x - 1 if self.config.center_input_sample else x))
        skips = [feature]
        for block in self.down_blocks:
            feature, stage_skips = block(feature, context)
            skips += stage_skips
        if extras.down:
            skips = [_plus(skip, residual) for skip, residual in zip(skips, extras.down, strict=True)]
        if self.mid_block is not None:
            feature = self.mid_block(feature, context)
        if extras.mid:
            feature = _plus(feature, extras.mid[0])
        for block in self.up_blocks:
            feature = block(feature, skips, context)
        return self.conv_out(self.conv_norm_out(feature, activation=self.config.activation), moments=False).x

    def _timesteps(self, timestep: Tensor | float, count: int) -> Tensor:
        if not isinstance(timestep, Tensor):
            number = as_float(timestep)
            if number is None or abs(number) > MOST_TIMESTEP:
                raise InputError(f"timestep: {shown(timestep)} is not a timestep; give a number as in training")
            timestep = torch.tensor(number, dtype=torch.float64)
        return super()._timesteps(timestep, count)


def _plus(feature: Feature, residual: Tensor) -> Feature:
    return Feature(feature.x + residual.contiguous())


def _activation(name: str | None) -> str | None:
    """Return the canonical name of an activation."""
    return "silu" if name == "swish" else name


def _check_unsupported(cross_attention_kwargs: Any, down_intrablock_additional_residuals: Any) -> None:
    if not isinstance(cross_attention_kwargs, dict | None) or cross_attention_kwargs:
        raise InputError("cross_attention_kwargs: attention processors are not supported; leave them out")
    if down_intrablock_additional_residuals is not None:
        raise InputError("down_intrablock_additional_residuals: T2I-Adapters are not supported; leave them out")


def _resnet_options(config: UNet2DConditionConfig) -> BlockOptions:
    return BlockOptions(
        temb_channels=config.block_temb_channels,
        eps=config.norm_eps,
        activation=config.activation,
        scale_shift=config.resnet_time_scale_shift == "scale_shift",
        num_groups=config.norm_num_groups,
        head_dim=None,
        downsample_padding=config.downsample_padding,
    )


def _time_projection(config: UNet2DConditionConfig) -> tuple[nn.Module, int]:
    """Return the module that embeds a timestep, and the width of its output."""
    if config.time_embedding_type == "fourier":
        half = config.temb_channels // 2
        module = GaussianFourierProjection(half, scale=1.0, log=False, flip_sin_to_cos=config.flip_sin_to_cos)
        return module, config.temb_channels
    width = config.block_out_channels[0]
    return Timesteps(width, config.flip_sin_to_cos, config.freq_shift), width


def _class_embedding(config: UNet2DConditionConfig, time_width: int) -> nn.Module | None:
    width, out = config.projection_class_embeddings_input_dim or 0, config.temb_channels
    if config.class_embed_type is None:
        return None if config.num_class_embeds is None else nn.Embedding(config.num_class_embeds, out)
    if config.class_embed_type == "timestep":
        return TimestepEmbedding(time_width, out, activation=config.activation)
    if config.class_embed_type == "projection":
        return TimestepEmbedding(width, out)
    return nn.Linear(width, out) if config.class_embed_type == "simple_projection" else nn.Identity()


def _add_embedding(config: UNet2DConditionConfig) -> nn.Module | None:
    if config.addition_embed_type == "text":
        return TextTimeEmbedding(config.text_width, config.temb_channels, config.addition_embed_type_num_heads)
    if config.addition_embed_type == "text_time" and config.projection_class_embeddings_input_dim is not None:
        return TimestepEmbedding(config.projection_class_embeddings_input_dim, config.temb_channels)
    return None


def _down_blocks(config: UNet2DConditionConfig, options: TextBlockOptions) -> list[TextDownBlock2D]:
    stages = config.down_stages
    befores = (config.block_out_channels[0], *config.block_out_channels)
    return [
        TextDownBlock2D(stage, befores[i], options, downsample=i < len(stages) - 1) for i, stage in enumerate(stages)
    ]


def _up_blocks(config: UNet2DConditionConfig, options: TextBlockOptions) -> list[TextUpBlock2D]:
    stages = config.up_stages
    last = len(stages) - 1
    return [
        TextUpBlock2D(stage, stages[max(i - 1, 0)].width, stages[min(i + 1, last)].width, options, upsample=i < last)
        for i, stage in enumerate(stages)
    ]

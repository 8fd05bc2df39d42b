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
from fastdiff.models import text_unet
from fastdiff.models.blocks.conditioning import Conditioning, Prompt
from fastdiff.models.blocks.embeddings import (
    ImageHintTimeEmbedding,
    ImageProjection,
    TextImageProjection,
    TextImageTimeEmbedding,
    TextTimeEmbedding,
    TimestepEmbedding,
    Timesteps,
    each_through,
)
from fastdiff.models.blocks.layers import ACTIVATIONS, Conv2d, Feature, GroupNorm
from fastdiff.models.blocks.text_attentions import TextReader
from fastdiff.models.blocks.transformer import Context, stack_text_projections
from fastdiff.models.denoiser import MOST_TIMESTEP, Denoiser
from fastdiff.models.model import takes_options
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

    @takes_options
    def __init__(self, config: UNet2DConditionConfig):
        super().__init__(config)
        first, temb_channels = config.block_out_channels[0], config.temb_channels
        options = text_unet.block_options(config)
        self.conv_in = Conv2d(config.in_channels, first, config.conv_in_kernel)
        self.time_proj, time_width = text_unet.time_projection(config)
        self.time_embedding = TimestepEmbedding(
            time_width,
            temb_channels,
            activation=config.activation,
            post_activation=text_unet.activation(config.timestep_post_act),
            condition_width=config.time_cond_proj_dim,
        )
        self.encoder_hid_proj = text_unet.text_projection(config)
        self.class_embedding = text_unet.class_embedding(config, time_width)
        self.add_embedding = text_unet.add_embedding(config)
        self.down_blocks = nn.ModuleList(text_unet.down_blocks(config, options))
        self.mid_block = text_unet.mid_block(config, options)
        self.up_blocks = nn.ModuleList(text_unet.up_blocks(config, options))
        self.conv_norm_out = None
        if config.norm_num_groups is not None:
            self.conv_norm_out = GroupNorm(config.norm_num_groups, first, eps=config.norm_eps)
        self.conv_out = Conv2d(first, config.out_channels, config.conv_out_kernel)

        self.time_emb_proj = self._stack_projections("time_emb_proj.", config.block_temb_channels)
        self.raw_time_emb_proj = self._stack_projections("raw_time_emb_proj.", config.block_temb_channels, raw=True)
        self.text_projections, self.stacked["text_projections."] = stack_text_projections(self, config.cross_width)
        self._place_text_readers()
        self._lay_out()

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor | None,
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
            encoder_hidden_states: the text, (N, L, text_width) in the model's dtype, on its device. It may be None with
                encoder_hid_dim_type `image_proj`, which replaces it.
            class_labels: with a label table (N,) int64; with class_embed_type `timestep` (N,); with `identity` and
                projections (N, width). None for a model without class embedding.
            timestep_cond: (N, time_cond_proj_dim), an embedding of the guidance scale, for LCM.
            attention_mask: (N, keys) for attn1 of all blocks, 1 to keep and 0 to hide. All must have that many keys. In
                SimpleCrossAttn blocks the text gives the keys, and it replaces encoder_attention_mask.
            cross_attention_kwargs: not supported: it must be None or empty.
            added_cond_kwargs: the entries of `config.added_shapes`: with addition_embed_type `text_time` (SDXL)
                text_embeds (N, width) and time_ids (N, count); with `text_image` text_embeds and image_embeds
                (N, width); with `image`, `text_image_proj` and `image_proj` image_embeds; with `image_hint` also hint
                (N, 3, 8 H, 8 W).
            down_block_additional_residuals: of a ControlNet, (N, C, H, W) to add to each skip connection.
            mid_block_additional_residual: of a ControlNet, (N, C, H, W) to add to the mid block's output. Give both
                kinds of residuals or none.
            down_intrablock_additional_residuals: of a T2I-Adapter; not supported: it must be None.
            encoder_attention_mask: (N, L) for the text, 1 to keep and 0 to hide; (N, config.tokens(L)) if a projection
                adds tokens.
            return_dict: whether to return a UNet2DConditionOutput instead of a tuple.

        Returns:
            UNet2DConditionOutput whose `sample` is (N, C_out, H, W), or a tuple of it.

        Raises:
            InputError: for an argument that the model does not take.
        """
        checked("return_dict", return_dict, bool)
        _check_unsupported(cross_attention_kwargs, down_intrablock_additional_residuals)
        self._check_sample(sample)
        timestep = self._checked_timestep(timestep, len(sample))
        self._check_labels(len(sample), class_labels)
        check = PromptCheck(self.config, self.dtype, self.device, len(sample))
        prompt = check.prompt(encoder_hidden_states, encoder_attention_mask, added_cond_kwargs, timestep_cond)
        size = (sample.shape[2], sample.shape[3])
        check.hint(prompt, *size)
        bias = check.attention_bias(attention_mask, size, prompt.text.shape[1])
        residuals = check.residuals(down_block_additional_residuals, mid_block_additional_residual, size)
        prediction = self._predicted(sample, timestep, class_labels, prompt, Extras(bias, *residuals))
        return UNet2DConditionOutput(prediction) if return_dict else (prediction,)

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
        return Conditioning(temb, timesteps, (self.project_text(*self._texts(prompt)), *self._rest(prompt)))

    def project(self, prompt: Prompt) -> tuple[Tensor, ...]:
        each = zip(*self._texts(prompt), strict=True)
        keys_and_values = torch.cat([self.project_text(*(part[None] for part in parts)) for parts in each])
        return keys_and_values, *self._rest(prompt)

    def usual_conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        shapes = self.config.prompt_shapes.items()
        text, *added = (
            torch.zeros(len(timesteps), *shape, dtype=self.dtype, device=self.device) for _, shape in shapes
        )
        return self.conditioning(timesteps, class_labels, Prompt(text, added=tuple(added)))

    @torch.no_grad()
    def project_text(self, text: Tensor, *image: Tensor) -> Tensor:
        """Return the keys and values of all attentions to the text, side by side: (M, L, text_width) -> (M, L', width).

        `image` is image_embeds (M, image_width) if `encoder_hid_dim_type` reads it. L' is `config.tokens(L)`.
        """
        if isinstance(self.encoder_hid_proj, nn.Linear):
            text = linear(text, self.encoder_hid_proj.weight, self.encoder_hid_proj.bias)
        elif self.encoder_hid_proj is not None:
            text = self.encoder_hid_proj(text, *image)
        columns = [] if self.text_projections is None else [linear(text, self.text_projections.weight)]
        columns += [reader.project(text) for reader in self.modules() if isinstance(reader, TextReader)]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def _place_text_readers(self) -> None:
        """Tell each reader its columns of the output of `project_text`, after the columns of `text_projections`."""
        start = 0 if self.text_projections is None else self.text_projections.out_features
        for reader in self.modules():
            if isinstance(reader, TextReader):
                stop = start + sum(layer.out_features for layer in reader.readers)
                reader.columns = slice(start, stop)
                start = stop

    def _texts(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """Return the arguments of `project_text`."""
        is_joined = isinstance(self.encoder_hid_proj, ImageProjection | TextImageProjection)
        return (prompt.text, self._named(prompt)["image_embeds"]) if is_joined else (prompt.text,)

    def _rest(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """Return `Conditioning.text` after the keys and values: the hint at the sample's size, the bias of the text."""
        if not isinstance(self.add_embedding, ImageHintTimeEmbedding):
            return prompt.bias
        return self.add_embedding.shrink(self._named(prompt)["hint"]), *prompt.bias

    def _named(self, prompt: Prompt) -> dict[str, Tensor]:
        """Return `prompt.added` by the names of `config.added_shapes`."""
        return dict(zip(self.config.added_shapes, prompt.added, strict=True))

    @torch.no_grad()
    def embed(self, timesteps: Tensor, class_labels: Tensor | None, prompt: Prompt | None) -> Tensor:
        """Return what residual blocks read of time, class and added conditions: (M, conditioning_width)."""
        assert prompt is not None  # guaranteed by the callers
        self._check_labels(len(timesteps), class_labels)
        emb = self.time_embedding(self.time_proj(timesteps).to(self.dtype), *prompt.timestep_cond)
        if class_labels is not None:
            embedded = self._embed_labels(class_labels)
            concat = self.config.class_embeddings_concat
            emb = torch.cat([emb, embedded.expand_as(emb)], dim=1) if concat else emb + embedded
        if self.add_embedding is not None:
            emb = emb + self.add_embedding(*self._added(prompt))
        if self.config.time_embedding_act_fn is not None:
            emb = ACTIVATIONS[text_unet.activation(self.config.time_embedding_act_fn) or ""](emb)
        activated = ACTIVATIONS[self.config.activation](emb)
        pairs = ((activated, self.time_emb_proj), (emb, self.raw_time_emb_proj))
        columns = [each_through(each, layer) for each, layer in pairs if layer is not None]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def _embed_labels(self, labels: Tensor) -> Tensor:
        if self.config.class_embed_type == "timestep":
            labels = self.time_proj(labels)
        labels = labels if isinstance(self.class_embedding, nn.Embedding) else labels.to(self.dtype)
        if isinstance(self.class_embedding, nn.Linear):
            return each_through(labels, self.class_embedding)
        assert self.class_embedding is not None
        return self.class_embedding(labels).to(self.dtype)

    def _added(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """Return the inputs of `add_embedding`."""
        if isinstance(self.add_embedding, TextTimeEmbedding):
            return (prompt.text,)
        named = self._named(prompt)
        if isinstance(self.add_embedding, TimestepEmbedding):
            return (self._text_and_size(named["text_embeds"], named["time_ids"]),)
        text = (named["text_embeds"],) if isinstance(self.add_embedding, TextImageTimeEmbedding) else ()
        return *text, named["image_embeds"]

    def _text_and_size(self, text_embeds: Tensor, time_ids: Tensor) -> Tensor:
        """Return SDXL's pooled text and embedded time_ids, side by side."""
        config = self.config
        assert config.addition_time_embed_dim is not None
        waves = Timesteps(config.addition_time_embed_dim, config.flip_sin_to_cos, config.freq_shift)
        embedded = waves(time_ids.flatten()).unflatten(0, time_ids.shape).flatten(1)
        return torch.cat([text_embeds.float(), embedded], dim=1).to(self.dtype)

    @torch.no_grad()
    def predict(self, x: Tensor, conditioning: Conditioning, extras: Extras | None = None) -> Tensor:
        extras = extras or Extras()
        temb, _, (text, *text_bias) = conditioning
        each = (len(x), -1)
        if isinstance(self.add_embedding, ImageHintTimeEmbedding):
            x = torch.cat([x, text_bias.pop(0).expand(*each, -1, -1)], dim=-1)
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
        if self.conv_norm_out is not None:
            feature = self.conv_norm_out(feature, activation=self.config.activation)
        return self.conv_out(feature, moments=False).x

    def _checked_timestep(self, timestep: Tensor | float, count: int) -> Tensor:
        if not isinstance(timestep, Tensor):
            number = as_float(timestep)
            if number is None or abs(number) > MOST_TIMESTEP:
                raise InputError(f"timestep: {shown(timestep)} is not a timestep; give a number as in training")
            timestep = torch.tensor(number, dtype=torch.float64)
        return super()._checked_timestep(timestep, count)


def _plus(feature: Feature, residual: Tensor) -> Feature:
    return Feature(feature.x + residual.contiguous())


def _check_unsupported(cross_attention_kwargs: Any, down_intrablock_additional_residuals: Any) -> None:
    if not isinstance(cross_attention_kwargs, dict | None) or cross_attention_kwargs:
        raise InputError("cross_attention_kwargs: attention processors are not supported; leave them out")
    if down_intrablock_additional_residuals is not None:
        raise InputError("down_intrablock_additional_residuals: T2I-Adapters are not supported; leave them out")

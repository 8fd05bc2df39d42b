"""TextDenoiser: the encoder of a text U-Net, with its conditioning. UNet2DConditionModel and ControlNetModel share it.

The keys and values of every cross-attention depend on the text only, so `project_text` makes them once per prompt.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.arguments import as_float, shown
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.errors import InputError
from fastdiff.kernels.linear import linear
from fastdiff.models import text_unet
from fastdiff.models.blocks.conditioning import Conditioning, Given, Prompt
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
from fastdiff.models.blocks.layers import ACTIVATIONS, Conv2d, Feature, plus
from fastdiff.models.blocks.text_attentions import TextReader
from fastdiff.models.blocks.transformer import Context, stack_text_projections
from fastdiff.models.denoiser import MOST_TIMESTEP, Denoiser


class TextDenoiser(Denoiser):
    """The base class of models with the encoder of a text U-Net: its down blocks and its middle, with diffusers' names.

    A subclass builds its own layers after `__init__`, and then calls `_finish`.
    """

    joins_halves = True

    def __init__(self, config: Any):
        super().__init__(config)
        plan = self.encoder_config
        self._options = text_unet.block_options(plan)
        self.conv_in = Conv2d(plan.in_channels, plan.block_out_channels[0], plan.conv_in_kernel)
        self.time_proj, time_width = text_unet.time_projection(plan)
        self.time_embedding = TimestepEmbedding(
            time_width,
            plan.temb_channels,
            activation=plan.activation,
            post_activation=text_unet.activation(plan.timestep_post_act),
            condition_width=plan.time_cond_proj_dim,
        )
        self.encoder_hid_proj = text_unet.text_projection(plan)
        self.class_embedding = text_unet.class_embedding(plan, time_width)
        self.add_embedding = text_unet.add_embedding(plan)
        self.down_blocks = nn.ModuleList(text_unet.down_blocks(plan, self._options))
        self.mid_block = text_unet.mid_block(plan, self._options)

    def _finish(self) -> None:
        """Stack the projections of all blocks, and lay the weights out."""
        plan = self.encoder_config
        self.time_emb_proj = self._stack_projections("time_emb_proj.", plan.block_temb_channels)
        self.raw_time_emb_proj = self._stack_projections("raw_time_emb_proj.", plan.block_temb_channels, raw=True)
        self.text_projections, self.stacked["text_projections."] = stack_text_projections(self, plan.cross_width)
        self._place_text_readers()
        self._lay_out()

    @property
    def embeds_prompt(self) -> bool:
        return self.add_embedding is not None or self.encoder_config.time_cond_proj_dim is not None

    @property
    def encoder_config(self) -> UNet2DConditionConfig:
        """The config of a U-Net with this encoder."""
        raise NotImplementedError

    def encode(
        self,
        x: Tensor,
        conditioning: Conditioning,
        bias: Given = (),
        added: Feature | None = None,
        inside: Given = (),
    ) -> tuple[list[Feature], Context]:
        """Return the skip connections followed by the middle's output, and the context for further blocks.

        Args:
            x: (N, H, W, C_in).
            conditioning: N entries, or one for all. Its text is the keys and values, and perhaps a bias of the keys.
            bias: (N, keys of attn1).
            added: (N, H, W, block_out_channels[0]), added to the output of conv_in.
            inside: of a T2I-Adapter, (N, H, W, C) added inside each down block, and perhaps one more for the middle.
        """
        temb, _, (text, *others) = conditioning
        each = (len(x), -1)
        text_bias = [other for other in others if other.ndim == 2]
        context = Context(
            temb.expand(*each),
            text.expand(*each, -1),
            text_bias[0].expand(*each) if text_bias else None,
            bias[0] if bias else None,
            tuple(other.expand(*each, -1) for other in others if other.ndim == 3),
        )
        feature = self.conv_in(Feature(x), residual=added)
        outputs = [feature]
        for i, block in enumerate(self.down_blocks):
            feature, skips = block(feature, context, *inside[i : i + 1])
            outputs += skips
        feature = feature if self.mid_block is None else self.mid_block(feature, context)
        for last in inside[len(self.down_blocks) :]:  # of SDXL's adapters; diffusers ignores it if it does not fit
            feature = plus(feature, last) if last.shape == feature.x.shape else feature
        return [*outputs, feature], context

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
        project = self.graphed("project", self.project_text) if self.device.type == "cuda" else self.project_text
        each = zip(*self._texts(prompt), strict=True)
        keys_and_values = torch.cat([project(*(part[None] for part in parts)) for parts in each])
        return keys_and_values, *self._rest(prompt)

    def usual_conditioning(self, timesteps: Tensor, class_labels: Tensor | None = None) -> Conditioning:
        shapes = self.encoder_config.prompt_shapes.items()
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
        if not columns:  # a ControlNet without attentions
            return text[..., :0]
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
        return dict(zip(self.encoder_config.added_shapes, prompt.added, strict=True))

    @torch.no_grad()
    def embed(self, timesteps: Tensor, class_labels: Tensor | None, prompt: Prompt | None) -> Tensor:
        """Return what residual blocks read of time, class and added conditions: (M, conditioning_width)."""
        self._check_labels(len(timesteps), class_labels)
        emb = self.time_embedding(self.time_proj(timesteps).to(self.dtype), *(prompt.timestep_cond if prompt else ()))
        if class_labels is not None:
            embedded = self._embed_labels(class_labels)
            concat = self.encoder_config.class_embeddings_concat
            emb = torch.cat([emb, embedded.expand_as(emb)], dim=1) if concat else emb + embedded
        if self.add_embedding is not None:
            assert prompt is not None  # guaranteed by the callers
            emb = emb + self.add_embedding(*self._added(prompt))
        if self.encoder_config.time_embedding_act_fn is not None:
            emb = ACTIVATIONS[text_unet.activation(self.encoder_config.time_embedding_act_fn) or ""](emb)
        activated = ACTIVATIONS[self.encoder_config.activation](emb)
        pairs = ((activated, self.time_emb_proj), (emb, self.raw_time_emb_proj))
        columns = [each_through(each, layer) for each, layer in pairs if layer is not None]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def _embed_labels(self, labels: Tensor) -> Tensor:
        if self.encoder_config.class_embed_type == "timestep":
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
        config = self.encoder_config
        assert config.addition_time_embed_dim is not None
        waves = Timesteps(config.addition_time_embed_dim, config.flip_sin_to_cos, config.freq_shift)
        embedded = waves(time_ids.flatten()).unflatten(0, time_ids.shape).flatten(1)
        return torch.cat([text_embeds.float(), embedded], dim=1).to(self.dtype)

    def _checked_timestep(self, timestep: Tensor | float, count: int) -> Tensor:
        if not isinstance(timestep, Tensor):
            number = as_float(timestep)
            if number is None or abs(number) > MOST_TIMESTEP:
                raise InputError(f"timestep: {shown(timestep)} is not a timestep; give a number as in training")
            timestep = torch.tensor(number, dtype=torch.float64)
        return super()._checked_timestep(timestep, count)

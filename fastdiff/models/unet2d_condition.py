"""UNet2DConditionModel: the denoiser of Stable Diffusion, which reads a text.

Rombach et al. 2022, arXiv 2112.10752.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.errors import InputError
from fastdiff.models import text_unet
from fastdiff.models.blocks.conditioning import Conditioning, Given, Prompt
from fastdiff.models.blocks.embeddings import ImageHintTimeEmbedding
from fastdiff.models.blocks.layers import Conv2d, Feature, GroupNorm, plus
from fastdiff.models.blocks.transformer import Context
from fastdiff.models.model import takes_options
from fastdiff.models.prompt import Extras, PromptCheck
from fastdiff.models.text_denoiser import TextDenoiser
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked


@read_by_name
class UNet2DConditionOutput(NamedTuple):
    """The output of a UNet2DConditionModel.

    `sample` is (N, C_out, H, W), the prediction: noise or velocity, according to the scheduler's config.
    """

    sample: Tensor


class UNet2DConditionModel(TextDenoiser):
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

    @takes_options
    def __init__(self, config: UNet2DConditionConfig):
        super().__init__(config)
        self.up_blocks = nn.ModuleList(text_unet.up_blocks(config, self._options))
        first, self.conv_norm_out = config.block_out_channels[0], None
        if config.norm_num_groups is not None:
            self.conv_norm_out = GroupNorm(config.norm_num_groups, first, eps=config.norm_eps)
        self.conv_out = Conv2d(first, config.out_channels, config.conv_out_kernel)
        # Takes image prompts out of `added_cond_kwargs`, and returns the others and `Prompt.images`; see
        # `fastdiff.acceleration.ip_adapters`
        self.image_reader: Callable[[PromptCheck, Any], tuple[Any, Given]] | None = None
        self._finish()

    @property
    def encoder_config(self) -> UNet2DConditionConfig:
        return self.config

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
        down_intrablock_additional_residuals: Sequence[Tensor] | None = None,
        encoder_attention_mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> UNet2DConditionOutput | tuple[Tensor]:
        """Predict at one timestep. Arguments and output match diffusers' model.

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
            down_block_additional_residuals: of a ControlNet, (N, C, H, W) or (N, C, 1, 1) to add to each skip
                connection.
            mid_block_additional_residual: of a ControlNet, as these, to add to the mid block's output. Give both kinds
                of residuals or none.
            down_intrablock_additional_residuals: of a T2I-Adapter, (N, C, H, W) to add inside each down block, and
                perhaps one more for the middle.
            encoder_attention_mask: (N, L) for the text, 1 to keep and 0 to hide; (N, config.tokens(L)) if a projection
                adds tokens.
            return_dict: whether to return a UNet2DConditionOutput instead of a tuple.

        Returns:
            UNet2DConditionOutput whose `sample` is (N, C_out, H, W), or a tuple of it.

        Raises:
            InputError: for an argument that the model does not take.
        """
        checked("return_dict", return_dict, bool)
        _check_unsupported(cross_attention_kwargs)
        self._check_sample(sample)
        timestep = self._checked_timestep(timestep, len(sample))
        self._check_labels(len(sample), class_labels)
        check = PromptCheck(self.config, self.dtype, self.device, len(sample))
        images: Given = ()
        if self.image_reader is not None:
            added_cond_kwargs, images = self.image_reader(check, added_cond_kwargs)
        prompt = check.prompt(encoder_hidden_states, encoder_attention_mask, added_cond_kwargs, timestep_cond)
        prompt = prompt._replace(images=images)
        size = (sample.shape[2], sample.shape[3])
        check.hint(prompt, *size)
        bias = check.attention_bias(attention_mask, size, prompt.text.shape[1])
        residuals = check.residuals(down_block_additional_residuals, mid_block_additional_residual, size)
        inside = check.inside(down_intrablock_additional_residuals, size)
        prediction = self._predicted(sample, timestep, class_labels, prompt, Extras(bias, *residuals, inside))
        return UNet2DConditionOutput(prediction) if return_dict else (prediction,)

    @torch.no_grad()
    def predict(self, x: Tensor, conditioning: Conditioning, extras: Extras | None = None) -> Tensor:
        extras = extras or Extras()
        outputs, context = self.encode(x, conditioning, extras.bias, inside=extras.inside)
        residuals = extras.down + extras.mid
        return self.decode([*map(plus, outputs, residuals)] if residuals else outputs, context)

    def _rest(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """As TextDenoiser._rest, with the keys and values of image prompts, which a ControlNet does not read."""
        return *super()._rest(prompt), *prompt.images

    def encode(
        self,
        x: Tensor,
        conditioning: Conditioning,
        bias: Given = (),
        added: Feature | None = None,
        inside: Given = (),
    ) -> tuple[list[Feature], Context]:
        """As TextDenoiser.encode. A hint becomes channels of x."""
        text, *others = conditioning.text
        if isinstance(self.add_embedding, ImageHintTimeEmbedding):
            x = torch.cat([x, others.pop(0).expand(len(x), -1, -1, -1)], dim=-1)
            conditioning = conditioning._replace(text=(text, *others))
        x = 2 * x - 1 if self.config.center_input_sample else x
        return super().encode(x, conditioning, bias, added, inside)

    def decode(self, outputs: list[Feature], context: Context) -> Tensor:
        """Return the prediction (N, H, W, C_out), contiguous, from what `encode` returns."""
        *skips, feature = outputs
        for block in self.up_blocks:
            feature = block(feature, skips, context)
        if self.conv_norm_out is not None:
            feature = self.conv_norm_out(feature, activation=self.config.activation)
        return self.conv_out(feature, moments=False).x


def _check_unsupported(cross_attention_kwargs: Any) -> None:
    if isinstance(cross_attention_kwargs, dict) and "ip_adapter_masks" in cross_attention_kwargs:
        raise InputError("cross_attention_kwargs: ip_adapter_masks are not supported; leave them out")
    if not isinstance(cross_attention_kwargs, dict | None) or cross_attention_kwargs:
        raise InputError("cross_attention_kwargs: attention processors are not supported; leave them out")

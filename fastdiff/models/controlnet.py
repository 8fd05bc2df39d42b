"""ControlNetModel: a copy of a U-Net's encoder that reads a control picture (Zhang et al. 2023, arXiv 2302.05543).

Its zero convolutions make a residual for each skip connection of the U-Net, and one for the middle. In a pipeline they
write the U-Net's skip connections themselves: `add_to` adds each in the convolution's epilogue, with the scale in its
weights.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.checkpoints import registry, weights
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.single_files.controlnets import control_file, control_place
from fastdiff.checkpoints.single_files.tensors import OTHER_CONTROLNET, stored_header
from fastdiff.errors import InputError
from fastdiff.execution.replaying.trees import Fixed
from fastdiff.kernels.conv2d import conv2d
from fastdiff.models.blocks.conditioning import Conditioning, Given
from fastdiff.models.blocks.layers import Conv2d, Feature, as_feature, plus
from fastdiff.models.model import takes_options
from fastdiff.models.prompt import PromptCheck
from fastdiff.models.text_denoiser import TextDenoiser
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked

Filters = tuple[tuple[Tensor, Tensor], ...]  # (weight, bias) of each zero convolution


@read_by_name
class ControlNetOutput(NamedTuple):
    """The output of a ControlNetModel.

    `down_block_res_samples` has a residual (N, C, H, W) for each skip connection of a U-Net, and `mid_block_res_sample`
    is the one for the middle's output. With `global_pool_conditions`, H and W are 1.
    """

    down_block_res_samples: tuple[Tensor, ...]
    mid_block_res_sample: Tensor


class ControlExtras(NamedTuple):
    """The inputs of a ControlNet that a U-Net does not have."""

    condition: Given = ()  # (N, H, W, conditioning_channels), the control pictures, unless they are embedded already
    scales: Given = ()  # float32, of each residual
    bias: Given = ()  # (N, keys of attn1), from attention_mask


class ControlNetConditioningEmbedding(nn.Module):
    """Shrinks control pictures to the size of latents; diffusers' class of this name."""

    def __init__(self, channels: int, conditioning_channels: int, widths: Sequence[int]):
        super().__init__()
        self.conv_in = Conv2d(conditioning_channels, widths[0], 3)
        pairs = [
            (width, out, stride)
            for i, width in enumerate(widths[:-1])
            for out, stride in ((width, 1), (widths[i + 1], 2))
        ]
        self.blocks = nn.ModuleList(Conv2d(width, out, 3) for width, out, _ in pairs)
        self.strides = [stride for *_, stride in pairs]
        self.conv_out = Conv2d(widths[-1], channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, H, W, channels) for pictures (N, H', W', conditioning_channels)."""
        feature = self.conv_in(Feature(x), moments=False)
        for block, stride in zip(self.blocks, self.strides, strict=True):
            feature = block(Feature(F.silu(feature.x)), stride=stride, moments=False)
        return self.conv_out(Feature(F.silu(feature.x)), moments=False).x


class ControlNetModel(TextDenoiser):
    """A ControlNet for Stable Diffusion 1, 2 or XL, which makes residuals for a U-Net from control pictures.

    It takes the config, weights and call of diffusers' ControlNetModel, for inference only. See Model for how to build
    it. ::

        controlnet = ControlNetModel.from_pretrained("sd-controlnet-canny", device="cuda", dtype=torch.bfloat16)
        down, mid = controlnet(sample, timestep, encoder_hidden_states, controlnet_cond, return_dict=False)
    """

    config: ControlNetConfig
    whole = (
        "conv_in.", "time_embedding.", "class_embedding.", "add_embedding.", "controlnet_cond_embedding.",
        "controlnet_down_blocks.", "controlnet_mid_block.",
    )  # fmt: skip
    part = registry.CONTROLNET
    other_size = OTHER_CONTROLNET

    @takes_options
    def __init__(self, config: ControlNetConfig):
        super().__init__(config)
        *widths, middle = [channels for channels, *_ in config.encoder.residual_shapes(64, 64)]
        self.controlnet_cond_embedding = ControlNetConditioningEmbedding(
            config.block_out_channels[0], config.conditioning_channels, config.conditioning_embedding_out_channels
        )
        self.controlnet_down_blocks = nn.ModuleList(Conv2d(width, width, 1) for width in widths)
        self.controlnet_mid_block = Conv2d(middle, middle, 1)
        for layer in (self.controlnet_cond_embedding.conv_out, *self.zero_convolutions):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        self.place = object()  # another one whenever the weights have moved, as the graphs of a U-Net read them
        # Returns the embedded control pictures of a step of a loop; see `fastdiff.acceleration.controlnets`
        self.control_reader: Callable[[ControlNetModel, Tensor, Tensor], Fixed | None] | None = None
        self._finish()

    @classmethod
    def from_file(
        cls, path: Path, load: Load, config: Any, changes: Mapping[str, Any], *, ema: bool
    ) -> "ControlNetModel":
        """Load a ControlNet from a safetensors file or a pickle, with diffusers' names or the authors'.

        Arguments and errors are as in `from_single_file`.
        """
        place = control_place(control_file(path, stored_header(path)), config, ema=ema)
        return cls.from_folder(place.folder, load, {**place.options, **changes}, place.inside)

    @classmethod
    def from_unet(
        cls,
        unet: UNet2DConditionModel,
        controlnet_conditioning_channel_order: str = "rgb",
        conditioning_embedding_out_channels: tuple[int, ...] | None = (16, 32, 96, 256),
        load_weights_from_unet: bool = True,
        conditioning_channels: int = 3,
    ) -> "ControlNetModel":
        """Return a ControlNet with a U-Net's encoder, on its device and in its dtype. Its residuals are zeros.

        Args:
            unet: a U-Net of fastdiff.
            controlnet_conditioning_channel_order: `rgb` or `bgr`.
            conditioning_embedding_out_channels: see ControlNetConfig.
            load_weights_from_unet: whether to copy the encoder's weights.
            conditioning_channels: of a control picture.

        Raises InputError for a U-Net whose encoder no ControlNet has.
        """
        if not isinstance(unet, UNet2DConditionModel):
            raise InputError("unet: a ControlNet begins as a text U-Net; give a UNet2DConditionModel of fastdiff")
        options = {name: value for name, value in unet.config.items() if name in ControlNetConfig.__annotations__}
        options |= {
            "controlnet_conditioning_channel_order": controlnet_conditioning_channel_order,
            "conditioning_embedding_out_channels": conditioning_embedding_out_channels,
            "conditioning_channels": conditioning_channels,
        }
        model = cls.from_config(options, source="unet")
        if checked("load_weights_from_unet", load_weights_from_unet, bool):
            state = weights.diffusers_state(model)
            state |= {key: value for key, value in weights.diffusers_state(unet).items() if key in state}
            weights.load_weights(model, state, source="unet", dtype=unet.dtype, device=unet.device)
        return model.to(unet.device, unet.dtype)

    def release_graphs(self) -> None:
        super().release_graphs()
        self.place = object()

    @property
    def encoder_config(self) -> UNet2DConditionConfig:
        return self.config.encoder

    @property
    def zero_convolutions(self) -> tuple[Conv2d, ...]:
        """The convolutions that make the residuals: one for each skip connection, then one for the middle."""
        return *self.controlnet_down_blocks, self.controlnet_mid_block

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor,
        controlnet_cond: Tensor,
        conditioning_scale: float = 1.0,
        class_labels: Tensor | None = None,
        timestep_cond: None = None,
        attention_mask: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        cross_attention_kwargs: None = None,
        guess_mode: bool = False,
        return_dict: bool = True,
    ) -> ControlNetOutput | tuple[tuple[Tensor, ...], Tensor]:
        """Compute the residuals at one timestep. Arguments and output match diffusers' model.

        Args:
            sample: (N, C_in, H, W) in the model's dtype, on its device.
            timestep: a number, or a tensor of one or N timesteps. Fractions count.
            encoder_hidden_states: the text, (N, L, cross_attention_dim) in the model's dtype, on its device.
            controlnet_cond: the control pictures, (N, conditioning_channels, H', W') in [0, 1], where H' and W' are
                `config.condition_scale` times H and W.
            conditioning_scale: multiplies the residuals.
            class_labels: as in UNet2DConditionModel.
            timestep_cond: not supported: it must be None.
            attention_mask: (N, keys) for attn1 of all blocks, 1 to keep and 0 to hide. All must have that many keys.
            added_cond_kwargs: with addition_embed_type `text_time` (SDXL) text_embeds (N, width) and time_ids
                (N, count).
            cross_attention_kwargs: not supported: it must be None or empty.
            guess_mode: scale the residuals from 0.1 for the first to 1 for the middle's.
            return_dict: whether to return a ControlNetOutput instead of a tuple.

        Returns:
            ControlNetOutput, or the same as a tuple.

        Raises:
            InputError: for an argument that the model does not take.
        """
        checked("return_dict", return_dict, bool)
        if not isinstance(cross_attention_kwargs, dict | None) or cross_attention_kwargs:
            raise InputError("cross_attention_kwargs: attention processors are not supported; leave them out")
        self._check_sample(sample)
        timestep = self._checked_timestep(timestep, len(sample))
        self._check_labels(len(sample), class_labels)
        check = PromptCheck(self.config.encoder, self.dtype, self.device, len(sample))
        prompt = check.prompt(encoder_hidden_states, None, added_cond_kwargs, timestep_cond)
        size = (sample.shape[2], sample.shape[3])
        pixels = [side * self.config.condition_scale for side in size]
        condition = check.rows("controlnet_cond", controlnet_cond, self.config.conditioning_channels, *pixels)
        scale, guess = checked("conditioning_scale", conditioning_scale, float), checked("guess_mode", guess_mode, bool)
        bias = check.attention_bias(attention_mask, size, prompt.text.shape[1])
        if scale == 0:  # as a pipeline of diffusers asks for before its start and after its end
            *down, mid = self._zeros(len(sample), *size)
        else:
            scales = () if scale == 1 and not guess else (self.scales(scale, guess=guess).to(self.device),)
            known = None if self.control_reader is None else self.control_reader(self, condition, timestep)
            pictures = () if known is not None else (self.pixels(condition),)
            embedded = () if known is None else (known,)
            extras = ControlExtras(pictures, scales, bias)
            *down, mid = self._predicted(sample, timestep, class_labels, prompt, extras, *embedded)
        return ControlNetOutput(tuple(down), mid) if return_dict else (tuple(down), mid)

    def _zeros(self, n: int, height: int, width: int) -> list[Tensor]:
        """Return residuals of zeros, (n, C, H, W) or (n, C, 1, 1) each, for samples of this height and width."""
        pooled = self.config.global_pool_conditions
        shapes = self.encoder_config.residual_shapes(height, width)
        sizes = [(channels, 1, 1) if pooled else (channels, *size) for channels, *size in shapes]
        return [
            torch.zeros(n, *size, dtype=self.dtype, device=self.device).to(memory_format=torch.channels_last)
            for size in sizes
        ]

    @torch.no_grad()
    def predict(
        self, x: Tensor, conditioning: Conditioning, extras: ControlExtras | None = None, embedded: Given = ()
    ) -> Any:
        """Return the residuals, (N, H, W, C) or (N, 1, 1, C), as a tuple. `embedded` is from `embed_condition`."""
        condition, scales, bias = extras or ControlExtras()
        embedded = embedded or tuple(map(self.embed_condition, condition))
        added = Feature(embedded[0]) if embedded else None
        outputs, _ = self.encode(x, conditioning, bias, added)
        filters = self.filters(*scales)
        residuals = [self._residual(*each).x for each in zip(outputs, filters, strict=True)]
        return tuple(map(_mean, residuals)) if self.config.global_pool_conditions else tuple(residuals)

    def pixels(self, condition: Tensor) -> Tensor:
        """Return control pictures (N, channels, H', W') in the model's dtype, (N, H', W', channels)."""
        return condition.to(self.dtype).permute(0, 2, 3, 1)

    def channels_first(self, prediction: Any) -> Any:
        return tuple(map(super().channels_first, prediction))

    @torch.no_grad()
    def embed_condition(self, condition: Tensor) -> Tensor:
        """Return what conv_in's output is added to, (N, H, W, C), for control pictures (N, H', W', channels).

        It is the same at each step.
        """
        is_bgr = self.config.controlnet_conditioning_channel_order == "bgr"
        return self.controlnet_cond_embedding((condition.flip(-1) if is_bgr else condition).contiguous())

    def scales(self, scale: float, *, guess: bool) -> Tensor:
        """Return the factor of each residual, float32 on the CPU."""
        count = len(self.zero_convolutions)
        if guess and not self.config.global_pool_conditions:
            return torch.logspace(-1, 0, count) * scale
        return torch.full((count,), scale)

    @torch.no_grad()
    def filters(self, scales: Tensor | None = None) -> Filters:
        """Return the weights of the zero convolutions times `scales` (residuals,) float32."""
        layers = [(layer.weight, _bias(layer)) for layer in self.zero_convolutions]
        if scales is None:
            return tuple(layers)
        pairs = zip(layers, scales.unbind(), strict=True)
        return tuple(((weight * s).to(self.dtype), (bias * s).to(self.dtype)) for (weight, bias), s in pairs)

    @torch.no_grad()
    def add_to(
        self, outputs: list[Feature], x: Tensor, conditioning: Conditioning, embedded: Tensor, filters: Filters
    ) -> list[Feature]:
        """Return what a U-Net's `encode` returned, with this ControlNet's residuals added.

        Args:
            outputs: of the U-Net: (N, H, W, C) each.
            x: (N, H, W, C_in), the input of the first of N pictures.
            conditioning: N entries of this model's, or one for all.
            embedded: `embed_condition`, (N, H, W, C).
            filters: see `filters`.
        """
        own, _ = self.encode(x, conditioning, added=Feature(embedded))
        if self.config.global_pool_conditions:
            means = [_mean(self._residual(*each).x) for each in zip(own, filters, strict=True)]
            return [*map(plus, outputs, means)]
        each = zip(own, filters, outputs, strict=True)
        return [self._residual(hidden, layer, output) for hidden, layer, output in each]

    @staticmethod
    def _residual(hidden: Feature, layer: tuple[Tensor, Tensor], output: Feature | None = None) -> Feature:
        """Return a zero convolution's output, plus `output` and with moments if it is given."""
        residual = None if output is None else output.x
        return as_feature(conv2d(hidden.x, *layer, residual=residual, moments=output is not None))


def _bias(layer: Conv2d) -> Tensor:
    assert layer.bias is not None
    return layer.bias


def _mean(residual: Tensor) -> Tensor:
    """Return the mean of the pixels, (N, 1, 1, C). Each picture is computed alone, so its bits depend on no other."""
    means = [each.float().mean((0, 1), keepdim=True) for each in residual]
    return torch.stack(means).to(residual.dtype)

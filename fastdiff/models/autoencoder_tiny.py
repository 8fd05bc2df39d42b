"""AutoencoderTiny: TAESD, a small autoencoder for quick previews, with diffusers' config.json and weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.autoencoder import AutoencoderTinyConfig
from fastdiff.errors import InputError
from fastdiff.models.autoencoder import DecoderOutput
from fastdiff.models.blocks.layers import ACTIVATIONS, Conv2d, Feature
from fastdiff.models.coding import Autoencoder, Half
from fastdiff.models.model import takes_options
from fastdiff.schema import checked

LIMIT = 3  # the decoder softly limits latents to [-LIMIT, LIMIT]


class AutoencoderTinyOutput(NamedTuple):
    """The output of `AutoencoderTiny.encode`.

    `latents` is (N, C, h, w).
    """

    latents: Tensor


class AutoencoderTiny(Autoencoder):
    """A tiny autoencoder: TAESD, which shares the latents of a large VAE. It decodes faster and less sharply.

    It takes the config, weights and calls of diffusers' AutoencoderTiny, for inference only. See Model for how to build
    it. It can be the VAE of a pipeline, or the `preview_vae`, which decodes the previews alone. A picture has the same
    bits in any batch. ::

        pipe.preview_vae = AutoencoderTiny.from_pretrained("path/to/taesd", device="cuda", dtype=torch.bfloat16)

    Convolutions, nearest upsampling and the residual sums run on the kernel of `conv2d`. The activations are torch's,
    because the kernel has none without a norm.
    """

    config: AutoencoderTinyConfig
    whole = ("encoder.", "decoder.")  # it is small
    part = registry.TINY_VAE

    @takes_options
    def __init__(self, config: AutoencoderTinyConfig):
        super().__init__(config)
        self.encoder, self.decoder = _Encoder(config), _Decoder(config)
        # With use_tiling, every picture is computed tile by tile. Names and sizes are diffusers'.
        self.use_tiling = False
        self.tile_sample_min_size = 512
        self.tile_latent_min_size = 512 // config.scale
        self.tile_overlap_factor = 0.125
        self._lay_out()

    def enable_tiling(self, use_tiling: bool = True) -> None:
        """Compute pictures in overlapping tiles with blended seams, which takes less memory."""
        self.use_tiling = checked("use_tiling", use_tiling, bool)

    def disable_tiling(self) -> None:
        """Compute every picture as a whole."""
        self.use_tiling = False

    def enable_slicing(self) -> None:
        """Do nothing: pictures are always computed in as small batches as their size needs, with the same bits."""

    def disable_slicing(self) -> None:
        """Do nothing, as `enable_slicing`."""

    def forward(self, sample: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Encode pictures, round the latents to bytes, and decode them, as diffusers' model does.

        Args:
            sample: pictures, as in `encode`.
            return_dict: whether to return a DecoderOutput instead of a tuple.

        Returns:
            The same as `decode`.
        """
        (latents,) = self.encode(sample)
        levels = self.scale_latents(latents).mul(255).round() / 255
        return self.decode(self.unscale_latents(levels), return_dict=return_dict)

    def scale_latents(self, x: Tensor) -> Tensor:
        """Return latents mapped to [0, 1]: `latent_magnitude` and `latent_shift` decide how."""
        return x.div(2 * self.config.latent_magnitude).add(self.config.latent_shift).clamp(0, 1)

    def unscale_latents(self, x: Tensor) -> Tensor:
        """Return the latents of `scale_latents`."""
        return x.sub(self.config.latent_shift).mul(2 * self.config.latent_magnitude)

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderTinyOutput | tuple[Tensor]:
        """Encode pictures. Arguments and output match diffusers' model.

        Args:
            x: (N, C_in, H, W) in [-1, 1], of any float dtype, on the model's device.
            return_dict: whether to return an AutoencoderTinyOutput instead of a tuple.

        Returns:
            AutoencoderTinyOutput whose `latents` are (N, C, H / 8, W / 8) in the dtype of x, or a tuple of them.

        Raises:
            InputError: if x is not such a tensor.
        """
        checked("return_dict", return_dict, bool)
        self._check("x", x, self.config.in_channels, least=1)
        tile = _Tiles(self.tile_sample_min_size, self.tile_overlap_factor, 1 / self.config.encoder_scale)
        latents = self._run(AutoencoderTiny._encode, x, tile)
        return AutoencoderTinyOutput(latents) if return_dict else (latents,)

    def decode(self, x: Tensor, generator: Any = None, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Decode latents. Arguments and output match diffusers' model.

        Args:
            x: (N, C, h, w), of any float dtype, on the model's device: the denoiser's latents, divided by
                `config.scaling_factor`.
            generator: unused, as in diffusers.
            return_dict: whether to return a DecoderOutput instead of a tuple.

        Returns:
            DecoderOutput whose `sample` is (N, C_out, scale * h, scale * w) in the dtype of x, or a tuple of it.

        Raises:
            InputError: if x is not such a tensor.
        """
        checked("return_dict", return_dict, bool)
        self._check("x", x, self.config.latent_channels, least=1)
        tile = _Tiles(self.tile_latent_min_size, self.tile_overlap_factor, self.config.scale)
        sample = self._run(AutoencoderTiny._decode, x, tile)
        return DecoderOutput(sample) if return_dict else (sample,)

    @torch.no_grad()
    def _encode(self, x: Tensor) -> Tensor:
        return self.encoder(x.contiguous())

    @torch.no_grad()
    def _decode(self, z: Tensor) -> Tensor:
        return self.decoder(z.contiguous())

    def _run(self, half: Half, x: Tensor, tiles: "_Tiles") -> Tensor:
        """Run the encoder or decoder on x (N, C, H, W), in tiles if tiling is enabled."""
        pictures = x.permute(0, 2, 3, 1)
        if self.use_tiling:
            y = _tiled(lambda tile: self._in_turn(half, tile, self.dtype), pictures, tiles)
        else:
            y = self._in_turn(half, pictures, self.dtype)
        return y.to(x.dtype).permute(0, 3, 1, 2)


class _Block(nn.Module):
    """Three convolutions, a residual sum and ReLU; diffusers' AutoencoderTinyBlock."""

    def __init__(self, width: int, activation: str):
        super().__init__()
        self.activation = activation
        self.conv = nn.ModuleDict({str(i): Conv2d(width, width, 3) for i in (0, 2, 4)})

    def forward(self, x: Feature) -> Feature:
        first, second, third = self.conv.values()
        h = _activated(self.activation, _activated(self.activation, x, first), second)
        return _activated("relu", h, third, residual=x)


def _activated(activation: str, x: Any, layer: Any, **options: Any) -> Feature:
    """Return an activation of a convolution of x."""
    return Feature(ACTIVATIONS[activation](layer(x, moments=False, **options).x))


class _Encoder(nn.Module):
    """Pictures (N, H, W, C) in [-1, 1] -> latents (N, h, w, C); diffusers' EncoderTiny."""

    def __init__(self, config: AutoencoderTinyConfig):
        super().__init__()
        width, layers = config.encoder_block_out_channels[0], list[nn.Module]()
        for i, count in enumerate(config.num_encoder_blocks):
            layers.append(Conv2d(config.in_channels, width, 3) if i == 0 else Conv2d(width, width, 3, bias=False))
            layers += [_Block(width, config.activation) for _ in range(count)]
        layers.append(Conv2d(width, config.latent_channels, 3))
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})

    def forward(self, x: Tensor) -> Tensor:
        feature = Feature((x + 1) / 2)
        for layer in self.layers.values():
            if isinstance(layer, _Block):
                feature = layer(feature)
            else:  # all convolutions without bias halve the size
                feature = layer(feature, stride=2 if layer.bias is None else 1, padding=1, moments=False)
        return feature.x


class _Decoder(nn.Module):
    """Latents (N, h, w, C) -> pictures (N, H, W, C) about in [-1, 1]; diffusers' DecoderTiny."""

    def __init__(self, config: AutoencoderTinyConfig):
        super().__init__()
        self.activation, self.factor = config.activation, config.upsampling_scaling_factor
        self.mode = config.upsample_fn
        width, last = config.decoder_block_out_channels[0], len(config.num_decoder_blocks) - 1
        # diffusers counts the first activation and the upsamplers as layers
        layers: list[nn.Module | None] = [Conv2d(config.latent_channels, width, 3), None]
        for i, count in enumerate(config.num_decoder_blocks):
            layers += [_Block(width, config.activation) for _ in range(count)]
            between = [None, Conv2d(width, width, 3, bias=False)]
            layers += between if i < last else [Conv2d(width, config.out_channels, 3)]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers) if layer is not None})

    def forward(self, z: Tensor) -> Tensor:
        first, *layers = self.layers.values()
        feature = _activated(self.activation, Feature(torch.tanh(z / LIMIT) * LIMIT), first)
        for layer in layers:
            if isinstance(layer, _Block):
                feature = layer(feature)
            elif layer.bias is None:
                feature = self._upsampled(layer, feature)
            else:
                feature = layer(feature, moments=False)
        return feature.x * 2 - 1

    def _upsampled(self, layer: Any, x: Feature) -> Feature:
        if self.mode == "nearest" and self.factor == 2:
            return layer(x, upsample=True, moments=False)
        larger = F.interpolate(x.x.permute(0, 3, 1, 2), scale_factor=float(self.factor), mode=self.mode)
        return layer(Feature(larger.permute(0, 2, 3, 1).contiguous()), moments=False)


class _Tiles(NamedTuple):
    """How a picture is cut into tiles, as in diffusers' AutoencoderTiny."""

    side: int  # of an input tile, in pixels of the input
    overlap: float  # the share of a tile that the next one covers too
    scale: float  # output pixels per input pixel


def _tiled(function: Callable[[Tensor], Tensor], x: Tensor, tiles: _Tiles) -> Tensor:
    """Apply `function` to x (N, H, W, C) tile by tile, as in diffusers' _tiled_encode and _tiled_decode."""
    side, blended = tiles.side, int(tiles.side * tiles.overlap)
    if blended >= side or round(blended * tiles.scale) < 2:
        raise InputError(
            f"tile sizes: tiles of {side} cannot overlap by {tiles.overlap}; give larger tiles or another overlap"
        )
    height, width = (round(length * tiles.scale) for length in x.shape[1:3])
    if any(length != size / tiles.scale for length, size in zip(x.shape[1:3], (height, width), strict=True)):
        raise InputError(f"height, width: tiles need multiples of {round(1 / tiles.scale)}, got {tuple(x.shape[1:3])}")
    ramp = torch.arange(round(side * tiles.scale), device=x.device) / (round(blended * tiles.scale) - 1)
    ramp = ramp.clamp(0, 1)
    y: Tensor | None = None
    for top in range(0, x.shape[1], side - blended):
        for left in range(0, x.shape[2], side - blended):
            tile = function(x[:, top : top + side, left : left + side]).float()
            if y is None:
                y = tile.new_zeros(len(x), height, width, tile.shape[3])
            rows, columns = (round(start * tiles.scale) for start in (top, left))
            place = y[:, rows : rows + tile.shape[1], columns : columns + tile.shape[2]]
            mask = torch.ones_like(tile[0, :, :, :1])
            mask = mask if top == 0 else mask * ramp[: tile.shape[1], None, None]
            mask = mask if left == 0 else mask * ramp[None, : tile.shape[2], None]
            place.copy_(mask * tile + (1 - mask) * place)
    assert y is not None  # a picture has at least one tile
    return y

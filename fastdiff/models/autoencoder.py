"""AutoencoderKL: encode pictures to latents and decode them, with diffusers' config.json and weights."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.execution.devices import dtype_name
from fastdiff.models.blocks.layers import Conv2d, Feature
from fastdiff.models.blocks.vae import Decoder, Encoder
from fastdiff.models.coding import Autoencoder, Half
from fastdiff.models.distribution import DiagonalGaussianDistribution, Generators
from fastdiff.models.model import takes_options
from fastdiff.models.tiling import Tiles, blend, tiled
from fastdiff.outputs import read_by_name
from fastdiff.schema import checked

_log = logging.getLogger(__name__)


@read_by_name
class DecoderOutput(NamedTuple):
    """The output of `AutoencoderKL.decode`.

    `sample` is (N, C, H, W), the pictures, roughly in [-1, 1].
    """

    sample: Tensor


@read_by_name
class AutoencoderKLOutput(NamedTuple):
    """The output of `AutoencoderKL.encode`.

    `latent_dist` is the distribution of the latents.
    """

    latent_dist: DiagonalGaussianDistribution


class AutoencoderKL(Autoencoder):
    """The VAE of latent diffusion models: it encodes pictures to latents and decodes latents to pictures.

    It takes the config, weights and calls of diffusers' AutoencoderKL (Kingma and Welling 2013, arXiv 1312.6114;
    Rombach et al. 2022, arXiv 2112.10752), for inference only. See Model for how to build it. A picture has the same
    bits in any batch. ::

        vae = AutoencoderKL.from_pretrained("path/to/folder", dtype=torch.float16, device="cuda")
        latents = vae.encode(pictures).latent_dist.mode()
        pictures = vae.decode(latents).sample

    If the config says `force_upcast`, float16 weights are computed in float32, as in diffusers' SDXL pipeline. bfloat16
    weights, which have the range of float32, are computed in bfloat16. If a 16-bit output still has NaN or infinity,
    those pictures are computed again in float32, and a warning is logged.
    """

    config: AutoencoderKLConfig
    whole = (
        "encoder.conv_in.", "encoder.conv_out.", "quant_conv.", "post_quant_conv.", "decoder.conv_in.",
        "decoder.conv_out.",
    )  # fmt: skip
    part = registry.VAE

    @takes_options
    def __init__(self, config: AutoencoderKLConfig):
        super().__init__(config)
        latents = config.latent_channels
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = Conv2d(2 * latents, 2 * latents, 1) if config.use_quant_conv else None
        self.post_quant_conv = Conv2d(latents, latents, 1) if config.use_post_quant_conv else None
        # With use_tiling, pictures larger than a tile are computed tile by tile. Names and sizes are diffusers'.
        self.use_tiling = False
        self.tile_sample_min_size = config.tile_size
        self.tile_latent_min_size = config.tile_size // config.scale
        self.tile_overlap_factor = 0.25
        self.use_slicing = False
        self._has_warned = False
        self._lay_out()

    def enable_tiling(self, use_tiling: bool = True) -> None:
        """Compute pictures larger than a tile in overlapping tiles with blended seams, which takes less memory."""
        self.use_tiling = checked("use_tiling", use_tiling, bool)

    def disable_tiling(self) -> None:
        """Compute every picture as a whole."""
        self.use_tiling = False

    def enable_slicing(self) -> None:
        """Compute one picture at a time, which takes less memory. Pictures keep their bits."""
        self.use_slicing = True

    def disable_slicing(self) -> None:
        """Compute as many pictures at a time as their size allows."""
        self.use_slicing = False

    def forward(
        self,
        sample: Tensor,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Generators | None = None,
    ) -> DecoderOutput | tuple[Tensor]:
        """Encode and decode pictures. Arguments and output match diffusers' model.

        Args:
            sample: pictures, as in `encode`.
            sample_posterior: whether to draw the latents, with `generator`, instead of taking the most likely ones.
            return_dict: whether to return a DecoderOutput instead of a tuple.
            generator: a torch.Generator, or a list of one per picture.

        Returns:
            The same as `decode`.
        """
        checked("sample_posterior", sample_posterior, bool)
        (distribution,) = self.encode(sample)
        return self.decode(distribution.sample(generator) if sample_posterior else distribution.mode(), return_dict)

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode pictures. Arguments and output match diffusers' model.

        Args:
            x: (N, C_in, H, W) in [-1, 1], of any float dtype, on the model's device.
            return_dict: whether to return an AutoencoderKLOutput instead of a tuple.

        Returns:
            AutoencoderKLOutput whose `latent_dist` has latents of (N, C, H / scale, W / scale) in the dtype of x, or a
            tuple of that distribution.

        Raises:
            InputError: if x is not such a tensor.
        """
        checked("return_dict", return_dict, bool)
        self._check("x", x, self.config.in_channels, least=self.config.scale)
        sides = self.tile_sample_min_size, self.tile_latent_min_size
        tiles = Tiles(*sides, self.tile_overlap_factor, least=self.config.scale)
        distribution = DiagonalGaussianDistribution(self._run(AutoencoderKL._encode, x, tiles))
        return AutoencoderKLOutput(distribution) if return_dict else (distribution,)

    def decode(self, z: Tensor, return_dict: bool = True, generator: Any = None) -> DecoderOutput | tuple[Tensor]:
        """Decode latents. Arguments and output match diffusers' model.

        Args:
            z: (N, C, h, w), of any float dtype, on the model's device: the denoiser's latents, divided by
                `config.scaling_factor`.
            return_dict: whether to return a DecoderOutput instead of a tuple.
            generator: unused, as in diffusers.

        Returns:
            DecoderOutput whose `sample` is (N, C_out, scale * h, scale * w) in the dtype of z, or a tuple of it.

        Raises:
            InputError: if z is not such a tensor.
        """
        checked("return_dict", return_dict, bool)
        self._check("z", z, self.config.latent_channels, least=1)
        tiles = Tiles(self.tile_latent_min_size, self.tile_sample_min_size, self.tile_overlap_factor)
        sample = self._run(AutoencoderKL._decode, z, tiles)
        return DecoderOutput(sample) if return_dict else (sample,)

    def tiled_encode(
        self, x: Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode in tiles, whether or not tiling is enabled. The rest is as in `encode`."""
        return self._in_tiles(self.encode, x, return_dict)

    def tiled_decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Decode in tiles, whether or not tiling is enabled. The rest is as in `decode`."""
        return self._in_tiles(self.decode, z, return_dict)

    def _in_tiles(self, half: Callable[..., Any], x: Tensor, return_dict: bool) -> Any:
        before, self.use_tiling = self.use_tiling, True
        try:
            return half(x, return_dict)
        finally:
            self.use_tiling = before

    def blend_v(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        """Return b (N, C, H, W), its first `blend_extent` rows blended with the last rows of a."""
        return blend(a, b, blend_extent, dim=2)

    def blend_h(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        """Return b (N, C, H, W), its first `blend_extent` columns blended with the last columns of a."""
        return blend(a, b, blend_extent, dim=3)

    @torch.no_grad()
    def _encode(self, x: Tensor) -> Tensor:
        """(N, H, W, C_in) -> (N, h, w, 2 C)."""
        h = self.encoder(Feature(x.contiguous()))
        return h.x if self.quant_conv is None else self.quant_conv(h, moments=False).x

    @torch.no_grad()
    def _decode(self, z: Tensor) -> Tensor:
        """(N, h, w, C) -> (N, H, W, C_out)."""
        h = Feature(z.contiguous())
        return self.decoder(h if self.post_quant_conv is None else self.post_quant_conv(h, moments=False)).x

    def _run(self, half: Half, x: Tensor, tiles: Tiles) -> Tensor:
        """Run the encoder or decoder on x (N, C, H, W): in tiles if tiling is enabled and x is larger than a tile."""
        function = partial(self._finite, half)
        pictures = x.permute(0, 2, 3, 1)
        in_tiles = self.use_tiling and tiles.needed(*x.shape[2:])
        y = tiled(function, pictures, tiles) if in_tiles else function(pictures)
        return y.to(x.dtype).permute(0, 3, 1, 2)

    def _finite(self, half: Half, x: Tensor) -> Tensor:
        """Run the encoder or decoder on x (N, H, W, C): in float32 if the config says so, or if 16 bits overflow."""
        dtype = torch.float32 if self.dtype == torch.float16 and self.config.force_upcast else self.dtype
        y = self._in_turn(half, x, dtype)
        if dtype.itemsize > 2:
            return y
        y, finite = y.float(), y.isfinite().flatten(1).all(1).tolist()
        wrong = [i for i, is_finite in enumerate(finite) if not is_finite]
        if wrong:
            self._warn(dtype)
            y[wrong] = self._in_turn(half, x[wrong], torch.float32)
        return y

    def _warn(self, dtype: torch.dtype) -> None:
        if not self._has_warned:
            _log.warning(f"the VAE's output was NaN or infinite in {dtype_name(dtype)}; computed again in float32")
        self._has_warned = True

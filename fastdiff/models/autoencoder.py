"""AutoencoderKL: pictures to latents and back, built from diffusers' config.json and weights."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.errors import InputError
from fastdiff.execution.cpu_workers import map_in_turn
from fastdiff.execution.devices import dtype_name
from fastdiff.execution.tensors import FLOATS, beside, tensor
from fastdiff.kernels.plans.cpu import fast_on_cpu
from fastdiff.models.blocks.layers import Conv2d, Feature
from fastdiff.models.blocks.vae import Decoder, Encoder
from fastdiff.models.distribution import DiagonalGaussianDistribution, Generators
from fastdiff.models.model import Model
from fastdiff.models.tiling import Tiles, tiled
from fastdiff.schema import checked

_log = logging.getLogger(__name__)

# Pixels that a GPU computes at a time in 16 bits, at most, where one picture has fewer: a picture's bits know no
# company, so this bounds the memory alone. Chosen, not measured: one picture of 1024 x 1024, or 16 of 256 x 256.
PIXELS_AT_ONCE = 1024 * 1024


class DecoderOutput(NamedTuple):
    """sample: (N, C, H, W), the pictures, about in [-1, 1]."""

    sample: Tensor


class AutoencoderKLOutput(NamedTuple):
    """latent_dist: the distribution of the latents."""

    latent_dist: DiagonalGaussianDistribution


Half = Callable[["AutoencoderKL", Tensor], Tensor]  # the encoder or the decoder, over (N, H, W, C)


class AutoencoderKL(Model):
    """diffusers' AutoencoderKL (Kingma and Welling 2013, arXiv 1312.6114; Rombach et al. 2022, arXiv 2112.10752).

    See Model. A picture has the same bits in any batch.

    Weights in float16 are computed with in float32 where the config says `force_upcast`, as diffusers' pipeline of SDXL
    does; those in bfloat16, which has the range of float32, as they are. Where the output of 16 bits is NaN or infinite
    all the same, those pictures are computed again in float32, and a warning is logged.
    """

    config: AutoencoderKLConfig
    whole = (
        "encoder.conv_in.", "encoder.conv_out.", "quant_conv.", "post_quant_conv.", "decoder.conv_in.",
        "decoder.conv_out.",
    )  # fmt: skip
    part = registry.VAE

    def __init__(self, config: AutoencoderKLConfig):
        super().__init__(config)
        latents = config.latent_channels
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quant_conv = Conv2d(2 * latents, 2 * latents, 1) if config.use_quant_conv else None
        self.post_quant_conv = Conv2d(latents, latents, 1) if config.use_post_quant_conv else None
        # Whether pictures larger than a tile are computed tile by tile; the names and sizes are diffusers'.
        self.use_tiling = False
        self.tile_sample_min_size = config.sample_size
        self.tile_latent_min_size = config.sample_size // config.scale
        self.tile_overlap_factor = 0.25
        self._has_warned = False
        self._lay_out()

    def enable_tiling(self) -> None:
        """Compute pictures larger than a tile in tiles from now on, which takes less memory; the seams are blended."""
        self.use_tiling = True

    def disable_tiling(self) -> None:
        """Compute every picture whole from now on."""
        self.use_tiling = False

    def forward(
        self,
        sample: Tensor,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Generators | None = None,
    ) -> DecoderOutput | tuple[Tensor]:
        """Encode and decode pictures, called like diffusers' model.

        Args: sample as in `encode`; sample_posterior: draw the latents, by `generator`, rather than take the likeliest.
        Returns: as `decode`.
        """
        checked("sample_posterior", sample_posterior, bool)
        (distribution,) = self.encode(sample)
        return self.decode(distribution.sample(generator) if sample_posterior else distribution.mode(), return_dict)

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode pictures, called like diffusers' model.

        Args: x: (N, C_in, H, W), of any float dtype, on the model's device, in [-1, 1].

        Returns: AutoencoderKLOutput with `.latent_dist`, of (N, C, H / scale, W / scale), the dtype of x; a tuple of it
        when not `return_dict`. Raises InputError for what is no such tensor.
        """
        checked("return_dict", return_dict, bool)
        self._check("x", x, self.config.in_channels, least=self.config.scale)
        sides = self.tile_sample_min_size, self.tile_latent_min_size
        tiles = Tiles(*sides, self.tile_overlap_factor, least=self.config.scale)
        distribution = DiagonalGaussianDistribution(self._run(AutoencoderKL._encode, x, tiles))
        return AutoencoderKLOutput(distribution) if return_dict else (distribution,)

    def decode(self, z: Tensor, return_dict: bool = True, generator: Any = None) -> DecoderOutput | tuple[Tensor]:
        """Decode latents, called like diffusers' model.

        Args:
            z: (N, C, h, w), of any float dtype, on the model's device: what the denoiser made, divided by
                `config.scaling_factor`.
            generator: taken for the call's sake, as in diffusers; nothing is drawn.

        Returns: DecoderOutput with `.sample` (N, C_out, scale * h, scale * w), the dtype of z; a tuple of it when not
        `return_dict`. Raises InputError for what is no such tensor.
        """
        checked("return_dict", return_dict, bool)
        self._check("z", z, self.config.latent_channels, least=1)
        tiles = Tiles(self.tile_latent_min_size, self.tile_sample_min_size, self.tile_overlap_factor)
        sample = self._run(AutoencoderKL._decode, z, tiles)
        return DecoderOutput(sample) if return_dict else (sample,)

    @torch.no_grad()
    @fast_on_cpu()
    def _encode(self, x: Tensor) -> Tensor:
        """(N, H, W, C_in) -> (N, h, w, 2 C)."""
        h = self.encoder(Feature(x.contiguous()))
        return h.x if self.quant_conv is None else self.quant_conv(h, moments=False).x

    @torch.no_grad()
    @fast_on_cpu()
    def _decode(self, z: Tensor) -> Tensor:
        """(N, h, w, C) -> (N, H, W, C_out)."""
        h = Feature(z.contiguous())
        return self.decoder(h if self.post_quant_conv is None else self.post_quant_conv(h, moments=False)).x

    def _run(self, half: Half, x: Tensor, tiles: Tiles) -> Tensor:
        """Return a half of the model of x, both (N, C, H, W): whole, or in tiles, as x's size and the flag say."""
        function = partial(self._finite, half)
        pictures = x.permute(0, 2, 3, 1)
        in_tiles = self.use_tiling and tiles.needed(*x.shape[2:])
        y = tiled(function, pictures, tiles) if in_tiles else function(pictures)
        return y.to(x.dtype).permute(0, 3, 1, 2)

    def _finite(self, half: Half, x: Tensor) -> Tensor:
        """Return a half of x (N, H, W, C), in float32 where 16 bits would not do: by rule, or because they did not."""
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

    def _in_turn(self, half: Half, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a half of x (N, H, W, C), computed in `dtype`, as many pictures at a time as their size allows."""
        x = x.to(dtype)
        if self.device.type != "cuda":
            return torch.cat(list(map_in_turn(partial(half, self._of(dtype)), x)))
        run = self.graphed((half, dtype), lambda part: half(self._of(dtype), part))
        return torch.cat([run(part) for part in x.split(self._at_once(half, x))])

    def _at_once(self, half: Half, x: Tensor) -> int:
        """How many of these pictures a GPU computes at a time."""
        if x.dtype.itemsize > 2:  # attention is torch's there, which promises no bits in other company
            return 1
        scale = self.config.scale if half is AutoencoderKL._decode else 1
        return max(1, PIXELS_AT_ONCE // (scale**2 * x.shape[1] * x.shape[2]))

    def _of(self, dtype: torch.dtype) -> "AutoencoderKL":
        """Return this model with weights in `dtype`: made anew at each use, so that it follows their changes."""
        return self if dtype == self.dtype else copy.deepcopy(self).to(dtype)

    def _warn(self, dtype: torch.dtype) -> None:
        if not self._has_warned:
            _log.warning(f"the VAE's output was NaN or infinite in {dtype_name(dtype)}; computed again in float32")
        self._has_warned = True

    def _check(self, name: str, x: Any, channels: int, least: int) -> None:
        tensor(name, x, FLOATS)
        beside(name, x, self.device)
        if x.ndim != 4 or x.shape[1] != channels or not x.numel():
            raise InputError(f"{name}: expected (N, {channels}, H, W), got {tuple(x.shape)}")
        if min(x.shape[2:]) < least:
            raise InputError(f"{name}: {x.shape[2]} x {x.shape[3]} pixels make no latent; give {least} or more")
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{name}: it requires grad, and this model is for inference only; call it on {name}.detach()"
            )

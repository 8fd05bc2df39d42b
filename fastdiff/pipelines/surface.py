"""Surface: the methods of diffusers' DiffusionPipeline that are not about drawing, with their names and arguments."""

import inspect
import logging
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from fastdiff.arguments import as_int, shown
from fastdiff.checkpoints.registry import TEXT_ENCODER, TEXT_ENCODER_2, VAE, VALUE_FUNCTION
from fastdiff.errors import InputError
from fastdiff.execution.devices import resolve_device
from fastdiff.pipelines.parts import Parts
from fastdiff.refused import OF_PIPELINES, Refusing

AnySurface = TypeVar("AnySurface", bound="Surface")

_BAR = {*inspect.signature(tqdm.__init__).parameters} - {"self", "iterable", "total", "kwargs"}

_log = logging.getLogger(__name__)


class Surface(Refusing, Parts):
    """The methods that a user of diffusers' pipelines expects, beside those that draw."""

    refused = OF_PIPELINES
    hf_device_map: None = None  # diffusers' map of parts to devices: all parts are on one
    _bar: dict[str, Any] | None = None  # the options of the progress bar, once they are set

    def enable_model_cpu_offload(self, gpu_id: int | None = None, device: str | torch.device | None = None) -> None:
        """Keep each part in host memory, and move it to the GPU only while it runs, as `offload=True` does.

        Args:
            gpu_id: the number of the GPU. Default: that of `device`, else of the pipeline's GPU, else 0.
            device: the GPU's name, such as "cuda".

        Raises InputError if there is no such GPU.
        """
        gpu = self.device if device is None and self.device.type == "cuda" else None
        if gpu is None:
            gpu = resolve_device("auto" if device is None else device)
        if gpu.type != "cuda":
            raise InputError("enable_model_cpu_offload: it saves GPU memory, and there is no GPU; leave it out")
        if gpu_id is not None:
            if as_int(gpu_id) is None or int(gpu_id) < 0:
                raise InputError(f"gpu_id: {shown(gpu_id)} is not the number of a GPU; leave it out, or give 0")
            if device is not None and gpu.index is not None:
                raise InputError("gpu_id: device already has a number; leave out one of the two")
            gpu = resolve_device(f"cuda:{int(gpu_id)}")
        if self._gpu is None:
            self.to("cpu")
        self.offloaded_from(gpu)

    def enable_vae_tiling(self) -> None:
        """Compute large pictures in overlapping tiles: see `AutoencoderKL.enable_tiling`. It changes the pictures."""
        self._tiled_vae("enable_vae_tiling").enable_tiling()

    def disable_vae_tiling(self) -> None:
        """Compute every picture as a whole."""
        self._tiled_vae("disable_vae_tiling").disable_tiling()

    def enable_vae_slicing(self) -> None:
        """Decode one picture at a time: see `AutoencoderKL.enable_slicing`."""
        self._tiled_vae("enable_vae_slicing").enable_slicing()

    def disable_vae_slicing(self) -> None:
        """Decode as many pictures at a time as their size allows."""
        self._tiled_vae("disable_vae_slicing").disable_slicing()

    def _tiled_vae(self, method: str) -> Any:
        if self._vae is None:
            raise InputError(f"{method}: this pipeline has no VAE; leave it out")
        return self._vae

    def enable_attention_slicing(self, slice_size: str | int | None = "auto") -> None:
        """Accepted and not needed: attention here never stores all scores."""
        _log.debug("enable_attention_slicing is not needed: attention never stores all scores")

    def disable_attention_slicing(self) -> None:
        """Accepted and not needed, as `enable_attention_slicing`."""

    def set_attention_slice(self, slice_size: str | int | None) -> None:
        """Accepted and not needed, as `enable_attention_slicing`."""
        self.enable_attention_slicing(slice_size)

    def enable_xformers_memory_efficient_attention(self, attention_op: Any = None) -> None:
        """Accepted and not needed: attention here never stores all scores."""
        _log.debug("enable_xformers_memory_efficient_attention is not needed: attention never stores all scores")

    def disable_xformers_memory_efficient_attention(self) -> None:
        """Accepted and not needed, as `enable_xformers_memory_efficient_attention`."""

    def set_use_memory_efficient_attention_xformers(self, valid: bool, attention_op: Any = None) -> None:
        """Accepted and not needed, as `enable_xformers_memory_efficient_attention`."""
        self.enable_xformers_memory_efficient_attention(attention_op)

    def fuse_qkv_projections(self, unet: bool = True, vae: bool = True) -> None:
        """Accepted and not needed: the projections here are always fused."""
        _log.debug("fuse_qkv_projections is not needed: the projections are always fused")

    def unfuse_qkv_projections(self, unet: bool = True, vae: bool = True) -> None:
        """Accepted and without effect, as `fuse_qkv_projections`."""

    def disable_freeu(self) -> None:
        """Accepted and without effect: FreeU is never on."""

    @property
    def model_cpu_offload_seq(self) -> str:
        """The names of the models in the order in which they run, such as "text_encoder->unet->vae"."""
        order = TEXT_ENCODER.name, TEXT_ENCODER_2.name, self.denoiser.part.name, VAE.name, VALUE_FUNCTION.name
        return "->".join(name for name in order if self.components.get(name) is not None)

    def remove_all_hooks(self) -> None:
        """Accepted and without effect: offloading here uses no hooks."""

    def maybe_free_model_hooks(self) -> None:
        """Accepted and not needed: an offloaded part leaves the GPU when it has run."""

    def reset_device_map(self) -> None:
        """Accepted and without effect: all parts are on one device."""

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Show a progress bar during `__call__`, with these options of tqdm; `disable=True` shows none.

        Unlike diffusers' pipelines, ours show no bar before this is called. Raises InputError for an option that tqdm
        does not have.
        """
        unknown = sorted(kwargs.keys() - _BAR)
        if unknown:
            raise InputError(f"set_progress_bar_config: tqdm has no {unknown[0]}; use one of {', '.join(sorted(_BAR))}")
        self._bar = kwargs

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> Any:
        """Return a tqdm bar over `iterable` or of `total` steps. It is shown once `set_progress_bar_config` is called.

        Raises InputError without either.
        """
        if iterable is None and total is None:
            raise InputError("progress_bar: it needs a length; give iterable or total")
        return tqdm(iterable, total=total, **({"disable": True} if self._bar is None else self._bar))

    @staticmethod
    def numpy_to_pil(images: np.ndarray) -> list[Image.Image]:
        """Return PIL images of pictures (N, H, W, C) or (H, W, C) in [0, 1], with 1, 3 or 4 channels."""
        if not isinstance(images, np.ndarray) or images.ndim not in (3, 4) or images.shape[-1] not in (1, 3, 4):
            raise InputError(f"images: {shown(images)} is no array (N, H, W, C) of 1, 3 or 4 channels; give one")
        levels = (images.reshape(-1, *images.shape[-3:]) * 255).round().astype("uint8")
        return [Image.fromarray(each[..., 0] if each.shape[-1] == 1 else each) for each in levels]

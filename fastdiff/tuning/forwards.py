"""The forward of a workload: a model with the workload's config and random weights, and its inputs.

This module imports only fastdiff's public names and `tuning`, because `python benchmarks/bench_models.py --base REV`
runs it with the code of other commits too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fastdiff
from fastdiff.tuning import timing
from fastdiff.tuning.models import class_name

TEXT_LENGTH, TIME_IDS = 77, 6  # tokens of a prompt, and the number of SDXL's time ids
Z_IMAGE = "ZImageTransformer2DModel"
LATENT_SIDE, CAPTION_LENGTH = 128, 60  # of Z-Image: 1024x1024 pixels, and tokens of a caption before their padding


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a workload: float32 on a CPU or if the name ends in _fp32, otherwise bfloat16."""
    on_gpu = timing.DEVICE.type == "cuda"
    return torch.bfloat16 if on_gpu and not name.endswith("_fp32") else torch.float32


def forward(config: dict[str, Any], batch: int, dtype: torch.dtype) -> Callable[[], Any]:
    """Return a call of our model with a config. Weights and inputs are random, and the same in every run."""
    model, given = random_model(config, dtype), in_dtype(inputs(config, batch), dtype)
    return lambda: model(*given)


def random_model(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Return our model with a config, and with the same random weights in every run."""
    torch.manual_seed(0)
    name = class_name(config)
    with timing.DEVICE, _made_in(dtype if name == Z_IMAGE else torch.float32):  # the CPU takes long to draw the numbers
        return getattr(fastdiff, name).from_config(config).to(dtype)


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    """Make new parameters in `dtype`. In float32, the 6 billion parameters of Z-Image would fill a card of 24 GB."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def inputs(config: dict[str, Any], batch: int) -> tuple[Any, ...]:
    """Return the arguments of a forward, in float32.

    They are the sample (N, C, H, W), or (N, C, L) for a planner, and timesteps (N,). A label model also gets labels
    (N,) or None, and a text model its text. Z-Image gets latents (C, 1, H, W), times (N,) and captions (L, C).
    """
    if class_name(config) == Z_IMAGE:
        return _captioned_inputs(config, batch)
    timesteps = torch.full((batch,), 500, device=timing.DEVICE)
    if class_name(config) == "UNet1DModel":
        return torch.randn(batch, config["in_channels"], config["sample_size"], device=timing.DEVICE), timesteps
    if "cross_attention_dim" in config:
        return _text_inputs(config, timesteps)
    side, labelled = config["sample_size"], config.keys() & {"num_class_embeds", "num_embeds_ada_norm"}
    sample = torch.randn(batch, config.get("in_channels", 3), side, side, device=timing.DEVICE)
    labels = torch.zeros(batch, dtype=torch.int64, device=timing.DEVICE) if labelled else None
    return sample, timesteps, labels


def _captioned_inputs(config: dict[str, Any], batch: int) -> tuple[Any, ...]:
    side = config.get("sample_size", LATENT_SIDE)
    latents = torch.randn(batch, config["in_channels"], 1, side, side, device=timing.DEVICE)
    captions = torch.randn(batch, CAPTION_LENGTH, config["cap_feat_dim"], device=timing.DEVICE)
    return latents.unbind(), torch.full((batch,), 0.5, device=timing.DEVICE), captions.unbind()


def _text_inputs(config: dict[str, Any], timesteps: Tensor) -> tuple[Any, ...]:
    """Return sample, timesteps and text (N, 77, C). SDXL's pooled text and time ids are diffusers' eighth argument."""
    batch, side = len(timesteps), config["sample_size"]
    text = torch.randn(batch, TEXT_LENGTH, config["cross_attention_dim"], device=timing.DEVICE)
    added = {}
    if time_width := config.get("addition_time_embed_dim"):
        width = config["projection_class_embeddings_input_dim"] - TIME_IDS * time_width
        sizes = {"text_embeds": width, "time_ids": TIME_IDS}
        added = {name: torch.randn(batch, size, device=timing.DEVICE) for name, size in sizes.items()}
    sample = torch.randn(batch, config.get("in_channels", 4), side, side, device=timing.DEVICE)
    return (sample, timesteps, text, *[None] * 4, added) if added else (sample, timesteps, text)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor, or a tuple or dict with tensors, with all floating-point tensors in `dtype`."""
    if isinstance(value, dict):
        return {name: in_dtype(each, dtype) for name, each in value.items()}
    if isinstance(value, tuple):
        items = (in_dtype(each, dtype) for each in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

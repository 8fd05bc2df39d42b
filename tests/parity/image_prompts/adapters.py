"""Tiny IP-Adapters with random weights, their image encoder, and both libraries' pipelines with them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

SIZE = 30  # of the image encoder's pictures
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "projection_dim": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 10,
    "hidden_act": "gelu",
}
TOKENS, WIDTH, HEADS, DEPTH = 5, 128, 2, 2  # of a plus adapter
DEPTH_OF_DIFFUSERS = 4


def image_encoder(**options: Any) -> nn.Module:
    """Return a random image encoder of transformers."""
    model = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**ENCODER | options))
    _randomise(dict(model.named_parameters()), 11)
    return model.eval()


@torch.no_grad()
def _randomise(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            tensor.copy_(0.1 * noise + ("norm" in name and name.endswith("weight")))
        else:
            tensor.copy_(noise / math.sqrt(tensor[0].numel()))
    return tensors


def cross_attentions(unet: nn.Module) -> list[tuple[int, int]]:
    """Return the width and the text's width of a U-Net's cross-attentions, in diffusers' order."""
    names = [name.removesuffix(".processor") for name in unet.attn_processors if "attn2" in name]
    layers = [unet.get_submodule(name).to_k for name in names]
    return [(layer.out_features, layer.in_features) for layer in layers]


def ip_adapter(unet: nn.Module, kind: str = "plain", seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a random IP-Adapter file for diffusers' `unet`."""
    layers = cross_attentions(unet)
    text = layers[0][1]
    shapes: dict[str, tuple[int, ...]] = {
        f"ip_adapter.{2 * i + 1}.to_{name}_ip.weight": shape for i, shape in enumerate(layers) for name in "kv"
    }
    if kind == "plain":
        shapes |= {"image_proj.proj.weight": (4 * text, ENCODER["projection_dim"]), "image_proj.proj.bias": (4 * text,)}
        shapes |= {"image_proj.norm.weight": (text,), "image_proj.norm.bias": (text,)}
    else:
        own = {
            "latents": (1, TOKENS, WIDTH),
            "proj_in.weight": (WIDTH, ENCODER["hidden_size"]),
            "proj_in.bias": (WIDTH,),
        }
        own |= {"proj_out.weight": (text, WIDTH), "proj_out.bias": (text,)}
        own |= {"norm_out.weight": (text,), "norm_out.bias": (text,)}
        for i in range(DEPTH_OF_DIFFUSERS):
            inner = 64 * HEADS
            for norm in ("0.norm1", "0.norm2", "1.0"):
                own |= {f"layers.{i}.{norm}.weight": (WIDTH,), f"layers.{i}.{norm}.bias": (WIDTH,)}
            own |= {f"layers.{i}.0.to_q.weight": (inner, WIDTH), f"layers.{i}.0.to_kv.weight": (2 * inner, WIDTH)}
            own |= {f"layers.{i}.0.to_out.weight": (WIDTH, inner)}
            own |= {f"layers.{i}.1.1.weight": (4 * WIDTH, WIDTH), f"layers.{i}.1.3.weight": (WIDTH, 4 * WIDTH)}
        shapes |= {f"image_proj.{key}": shape for key, shape in own.items()}
    return _randomise({key: torch.empty(shape) for key, shape in shapes.items()}, 20 + seed)


def nested(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors as a .bin file holds them."""
    parts: dict[str, dict[str, Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for key, tensor in tensors.items():
        part, _, rest = key.partition(".")
        parts[part][rest] = tensor
    return parts


def save_ip_adapter(folder: Path, tensors: dict[str, Tensor], name: str = "ip-adapter.safetensors") -> Path:
    """Save an adapter, and the image encoder beside it. Return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".bin"):
        torch.save(nested(tensors), folder / name)
    else:
        save_file(tensors, folder / name)
    if not (folder / "image_encoder").exists():
        image_encoder().save_pretrained(folder / "image_encoder")
    return folder / name


def picture(seed: int = 0, width: int = 41, height: int = 33) -> Image.Image:
    """Return a random picture."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def with_encoder(theirs: Any) -> Any:
    """Give a pipeline of diffusers the image encoder, and the processor that needs no torchvision."""
    theirs.register_modules(
        image_encoder=image_encoder(), feature_extractor=CLIPImageProcessorPil(size=SIZE, crop_size=SIZE)
    )
    return theirs

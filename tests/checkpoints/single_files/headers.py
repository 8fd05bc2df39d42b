"""Safetensors files of zeros whose headers say anything, also what is not true."""

import json
import math
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]

UNET = "model.diffusion_model."
CONTEXT = UNET + "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
CLIP_1 = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"
OPEN_CLIP = "cond_stage_model.model.transformer.resblocks.0.ln_1.weight"
VAE: Shapes = {
    "first_stage_model.decoder.mid.block_1.norm1.weight": (8,),
    "first_stage_model.decoder.conv_in.weight": (8, 4, 3, 3),
}


def unet(width: int, channels: int = 4) -> Shapes:
    """Return the keys by which a U-Net is recognised."""
    return {f"{UNET}input_blocks.0.0.weight": (8, channels, 3, 3), CONTEXT: (8, width)}


def sdxl() -> Shapes:
    return (
        unet(2048)
        | {
            "conditioner.embedders.0.transformer.text_model.embeddings.token_embedding.weight": (8, 768),
            "conditioner.embedders.1.model.transformer.resblocks.0.ln_1.weight": (1280,),
        }
        | VAE
    )


def for_inpainting(shapes: Shapes) -> Shapes:
    """Return the shapes with a U-Net of nine input channels."""
    key = f"{UNET}input_blocks.0.0.weight"
    return shapes | {key: (8, 9, 3, 3)}


SD1 = unet(768) | {CLIP_1: (8, 768)} | VAE
SD2 = unet(1024) | {OPEN_CLIP: (1024,)} | VAE
SDXL = sdxl()
REFINER = (
    unet(1280)
    | {
        f"{UNET}label_emb.0.0.weight": (8, 8),
        "conditioner.embedders.0.model.transformer.resblocks.0.ln_1.weight": (1280,),
    }
    | VAE
)
_ATTENTION = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"
LORA: Shapes = {  # of SDXL, as kohya's trainers write it
    f"{_ATTENTION}.lora_down.weight": (8, 2048),
    f"{_ATTENTION}.lora_up.weight": (640, 8),
    f"{_ATTENTION}.alpha": (),
    "lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": (4, 1280),
    "lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": (5120, 4),
}


def write(path: Path, shapes: Shapes, metadata: dict[str, str] | None = None, **changes: Any) -> Path:
    """Write a file of zeros with these tensors. `changes` replace entries of the header by key."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for key, shape in shapes.items():
        size = math.prod(shape)
        entries[key] = {"dtype": "U8", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return write_raw(path, json.dumps(entries | changes).encode(), end)


def write_raw(path: Path, header: bytes, data: int = 0) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with open(path, "r+b") as file:
        file.truncate(8 + len(header) + data)
    return path

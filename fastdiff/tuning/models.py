"""The workloads of `fastdiff tune`: the configs of published and bundled models, with batch sizes.

A workload has the name of its row in the model benchmarks. This module does not import torch.
"""

import json
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parents[1] / "bundled"


def saved_config(name: str, part: str) -> dict[str, Any]:
    """Return the config of a component of a bundled model, without the entries that diffusers adds for its own use."""
    saved = json.loads((BUNDLED / name / part / "config.json").read_text(encoding="utf-8"))
    return {option: value for option, value in saved.items() if not option.startswith("_")}


DDPM32: dict[str, Any] = {  # google/ddpm-cifar10-32
    "sample_size": 32,
    "block_out_channels": (128, 256, 256, 256),
    "layers_per_block": 2,
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
}
DDPM256 = DDPM32 | {  # google/ddpm-celebahq-256
    "sample_size": 256,
    "block_out_channels": (128, 128, 256, 256, 512, 512),
    "down_block_types": ("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
}
EMOJI64: dict[str, Any] = {  # the bundled label model
    "sample_size": 64,
    "block_out_channels": (48, 96, 128, 128),
    "layers_per_block": 2,
    "attention_head_dim": 32,
    "norm_num_groups": 16,
    "num_class_embeds": 217,
    "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
}
EMOJI64_DIT = saved_config("emoji64-dit", "transformer")  # the bundled transformer
EMOJI_SD = saved_config("emoji-sd", "unet")  # the bundled text model
SD15: dict[str, Any] = {  # stable-diffusion-v1-5; entries that SD15 and SDXL lack are the class's defaults
    "sample_size": 64,
    "cross_attention_dim": 768,
}
SDXL: dict[str, Any] = {  # stabilityai/stable-diffusion-xl-base-1.0
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
DIT_XL2: dict[str, Any] = {  # facebook/DiT-XL-2-256
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "num_embeds_ada_norm": 1000,
    "activation_fn": "gelu-approximate",
}
Z_IMAGE: dict[str, Any] = {"cap_feat_dim": 2560, "in_channels": 16}  # Tongyi-MAI/Z-Image-Turbo
HOPPER32: dict[str, Any] = {  # the policy of bglick13/hopper-medium-v2-value-function-hor32, with its horizon
    "sample_size": 32,
    "in_channels": 14,
    "out_channels": 14,
    "extra_in_channels": 0,
    "time_embedding_type": "positional",
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "use_timestep_embedding": True,
    "block_out_channels": (32, 64, 128, 256),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "act_fn": "mish",
    "down_block_types": ("DownResnetBlock1D",) * 4,
    "mid_block_type": "MidResTemporalBlock1D",
    "up_block_types": ("UpResnetBlock1D",) * 3,
    "out_block_type": "OutConv1DBlock",
}
HOPPER128 = HOPPER32 | {  # with horizon 128
    "sample_size": 128,
    "block_out_channels": (32, 128, 256),
    "down_block_types": ("DownResnetBlock1D",) * 3,
    "up_block_types": ("UpResnetBlock1D",) * 2,
}

# workload -> config and batch size; names that end in _fp32 run in float32
WORKLOADS: dict[str, tuple[dict[str, Any], int]] = {
    f"{name}_b{batch}{dtype}": (config, batch)
    for name, config, batches, dtypes in (
        ("ddpm32", DDPM32, (1, 64, 512), ("",)),
        ("ddpm256", DDPM256, (1, 8), ("",)),
        ("emoji64", EMOJI64, (1, 64), ("",)),
        ("emoji64-dit", EMOJI64_DIT, (1, 64), ("",)),
        ("emoji-sd", EMOJI_SD, (1, 64), ("",)),
        ("dit", DIT_XL2, (2, 32), ("",)),
        ("sd15", SD15, (2, 16), ("",)),
        ("sdxl", SDXL, (2,), ("",)),
        ("z-image", Z_IMAGE, (1, 2), ("",)),
        ("hopper32", HOPPER32, (1, 64, 1024), ("", "_fp32")),
        ("hopper128", HOPPER128, (1, 64), ("", "_fp32")),
    )
    for batch in batches
    for dtype in dtypes
}


def class_name(config: dict[str, Any]) -> str:
    """Return the class name of a config, in diffusers and in fastdiff."""
    if "cap_feat_dim" in config:
        return "ZImageTransformer2DModel"
    if "cross_attention_dim" in config:
        return "UNet2DConditionModel"
    if "mid_block_type" in config:
        return "UNet1DModel"
    return "DiTTransformer2DModel" if "patch_size" in config else "UNet2DModel"

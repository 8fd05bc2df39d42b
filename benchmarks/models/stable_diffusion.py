"""The published configs of the parts of Stable Diffusion 1.5, 2.1 and XL, without values that are the defaults."""

from typing import Any

from fastdiff.tuning import models

SD15, SDXL = models.SD15, models.SDXL  # U-Nets, like SD21
SD21: dict[str, Any] = {
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
    "upcast_attention": True,
}

SD15_VAE: dict[str, Any] = {  # the VAE of SD 2.1 differs only in sample_size
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
SDXL_VAE = SD15_VAE | {"sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True}

SD15_TEXT: dict[str, Any] = {  # SDXL's first encoder has the same config
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "projection_dim": 768,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
SD21_TEXT = SD15_TEXT | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 23,
    "projection_dim": 512,
    "hidden_act": "gelu",
}
SDXL_TEXT_2 = SD21_TEXT | {  # a CLIPTextModelWithProjection
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 20,
    "num_hidden_layers": 32,
    "projection_dim": 1280,
}

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SD15_SCHEDULER: dict[str, Any] = _BETAS | {"skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1}  # PNDM
SD21_SCHEDULER: dict[str, Any] = _BETAS | {  # DDIM
    "prediction_type": "v_prediction",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
SDXL_SCHEDULER: dict[str, Any] = _BETAS | {"timestep_spacing": "leading", "steps_offset": 1}  # EulerDiscrete

"""Tiny diffusers pipelines of Stable Diffusion 1.x, 2.x and XL, with random weights that do not hide errors."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

LENGTH = 24  # tokens of a prompt
MERGED = ("the", "photo", "of", "cat", "astronaut", "riding", "trending", "'s", "'ll", "!!", "ne")  # single tokens

UNET = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
    "attention_head_dim": 2,  # heads, not their width
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
UNETS = {
    "sd1": UNET,
    "sd2": UNET | {"attention_head_dim": (2, 4), "use_linear_projection": True, "upcast_attention": True},
    "sdxl": UNET
    | {
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "cross_attention_dim": 32 + 40,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 24,
    },
}
VAE = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
VAES = {"sd1": VAE, "sd2": VAE, "sdxl": VAE | {"scaling_factor": 0.13025, "force_upcast": True}}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 2,  # as in old configs, whatever the end token is
}
OPEN_CLIP = CLIP | {"hidden_act": "gelu"}
PROJECTING = OPEN_CLIP | {"hidden_size": 40, "projection_dim": 24}
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a small vocabulary like CLIP's: every byte, inside a word and at its end, and a few merged words."""
    letters = ["!", *sorted(set(ByteLevel.alphabet()) - {"!"})]  # "!" has id 0, as in CLIP
    merges: dict[tuple[str, str], None] = {}
    for word in MERGED:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merges[parts[0], parts[1]] = None
            parts[:2] = ["".join(parts[:2])]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *dict.fromkeys("".join(pair) for pair in merges)]
    return {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}, list(merges)


def save_tokenizer(folder: Path, layout: str = "two-files", pad: str = "<|endoftext|>", length: int = LENGTH) -> Path:
    """Save a CLIP tokenizer with the vocabulary, in one of the file layouts of real folders. Return the folder."""
    ids, merges = vocabulary()
    folder.mkdir(parents=True, exist_ok=True)
    if layout in ("one-file", "both"):
        _tokenizer(pad, length).save_pretrained(folder)
    if layout == "one-file":
        return folder
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges), ""]), "utf-8")
    if layout == "both":
        return folder

    def as_object(content):  # as in the files of transformers 4
        return {"content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}

    named: dict[str, Any] = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    named = {key: as_object(content) for key, content in named.items()} | {"pad_token": pad}
    config = {"model_max_length": length, "tokenizer_class": "CLIPTokenizer", "do_lower_case": True}
    if layout == "old":
        (folder / "special_tokens_map.json").write_text(json.dumps(named))
        config |= {"bos_token": {"__type": "AddedToken", **as_object("<|startoftext|>")}, "pad_token": "!"}
    else:
        config |= {
            key: value if key == "pad_token" else {"__type": "AddedToken"} | value for key, value in named.items()
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def text_pipeline(kind: str, **parts: Any) -> diffusers.DiffusionPipeline:
    """Return a live pipeline. `kind` is sd1, sd2 (predicts v) or sdxl. `parts` replace parts by name.

    Pictures are 16 x 16. The U-Net's outputs are small, so that rounding errors do not grow from step to step. The
    prompt has an effect.
    """
    given = {"unet": tiny_unet(kind), "vae": tiny_vae(kind)}
    pipe = _PIPELINES[kind](given | parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def inpainting_pipeline(kind: str, **parts: Any) -> diffusers.DiffusionPipeline:
    """Return a live pipeline of an inpainting model, whose U-Net has nine input channels. As `text_pipeline`."""
    parts = text_pipeline(kind, unet=tiny_unet(kind, in_channels=9), **parts).components
    if kind == "sdxl":
        pipe = diffusers.StableDiffusionXLInpaintPipeline(**parts, add_watermarker=False)
    else:
        pipe = diffusers.StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)
    pipe.unet.register_to_config(sample_size=8)  # the pipeline sets it to 64
    pipe.set_progress_bar_config(disable=True)
    return pipe


def refiner_pipeline() -> diffusers.DiffusionPipeline:
    """Return a live pipeline of SDXL's refiner, which has the second text encoder alone."""
    encoder = tiny_encoder(PROJECTING, transformers.CLIPTextModelWithProjection, seed=1)
    unet = tiny_unet("sdxl", cross_attention_dim=40, projection_class_embeddings_input_dim=5 * 8 + 24)
    parts = text_pipeline("sdxl").components
    parts |= {"unet": unet, "text_encoder": None, "tokenizer": None, "text_encoder_2": encoder}
    pipe = diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _sd1(parts: dict[str, Any]) -> diffusers.DiffusionPipeline:
    scheduler = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, set_alpha_to_one=False)
    own = {"text_encoder": tiny_encoder(CLIP), "tokenizer": _tokenizer("<|endoftext|>"), "scheduler": scheduler}
    return _stable_diffusion(own | parts)


def _sd2(parts: dict[str, Any]) -> diffusers.DiffusionPipeline:
    options = {"clip_sample": False, "set_alpha_to_one": False, "prediction_type": "v_prediction"}
    scheduler = diffusers.DDIMScheduler(**BETAS, **options)
    own = {"text_encoder": tiny_encoder(OPEN_CLIP), "tokenizer": _tokenizer("!"), "scheduler": scheduler}
    return _stable_diffusion(own | parts)


def _stable_diffusion(parts: dict[str, Any]) -> diffusers.DiffusionPipeline:
    unused = {"safety_checker": None, "feature_extractor": None, "image_encoder": None}
    pipe = diffusers.StableDiffusionPipeline(**unused | parts, requires_safety_checker=False)
    pipe.text_encoder.__dict__["text_model"] = pipe.text_encoder  # clip_skip reads it; transformers 5 lacks it
    return pipe


def _sdxl(parts: dict[str, Any]) -> diffusers.DiffusionPipeline:
    own = {
        "text_encoder": tiny_encoder(CLIP),
        "text_encoder_2": tiny_encoder(PROJECTING, transformers.CLIPTextModelWithProjection, seed=1),
        "tokenizer": _tokenizer("<|endoftext|>"),
        "tokenizer_2": _tokenizer("!"),
        "scheduler": diffusers.EulerDiscreteScheduler(**BETAS, timestep_spacing="leading"),
    }
    return diffusers.StableDiffusionXLPipeline(**own | parts, add_watermarker=False)


_PIPELINES: dict[str, Callable[[dict[str, Any]], diffusers.DiffusionPipeline]] = {
    "sd1": _sd1,
    "sd2": _sd2,
    "sdxl": _sdxl,
}
KINDS = tuple(_PIPELINES)


def tiny_unet(kind: str, **options: Any) -> nn.Module:
    """Return the U-Net of a kind, with changed options."""
    unet = _randomised(diffusers.UNet2DConditionModel(**UNETS[kind] | options), seed=2)
    unet.conv_out.weight.data *= 0.3
    return unet


def tiny_controlnet(kind: str, seed: int = 4, **options: Any) -> nn.Module:
    """Return a ControlNet for the U-Net of a kind, with changed options. Its pictures are twice as large as latents."""
    unet = {name: value for name, value in UNETS[kind].items() if name not in ("sample_size", "up_block_types")}
    config = unet | {"conditioning_embedding_out_channels": (6, 10)} | options
    return _randomised(diffusers.ControlNetModel(**config), seed)


def tiny_vae(kind: str, **options: Any) -> nn.Module:
    """Return the VAE of a kind, with changed options."""
    return _randomised(diffusers.AutoencoderKL(**VAES[kind] | options), seed=3)


def tiny_encoder(config: dict[str, Any], model: type = transformers.CLIPTextModel, seed: int = 0) -> nn.Module:
    """Return a text encoder with the size of the vocabulary, unless the config sets another vocab_size."""
    config = {"vocab_size": len(vocabulary()[0])} | config
    return _randomised(model(transformers.CLIPTextConfig(**config)), seed)


def _tokenizer(pad: str, length: int = LENGTH) -> transformers.CLIPTokenizer:
    return transformers.CLIPTokenizer(*vocabulary(), pad_token=pad, model_max_length=length)


@torch.no_grad()
def _randomised(model: nn.Module, seed: int) -> nn.Module:
    """Give every parameter random values, none zero. Weights keep their input's scale; norm weights are about 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.copy_(0.1 * noise + ("norm" in name and name.endswith("weight")))
        else:
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))
    return model.eval()

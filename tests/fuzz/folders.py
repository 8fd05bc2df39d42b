"""Tiny model folders of every kind that fastdiff runs, made once per process and hard-linked for each case."""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from fastdiff.checkpoints.weights import diffusers_shapes
from fastdiff.models.classes import DENOISERS
from tests.parity.z_image import tiny
from tests.support.text_pipelines import UNETS, save_tokenizer, text_pipeline, vocabulary

STEM = "diffusion_pytorch_model"
UNET = {
    "_class_name": "UNet2DModel",
    "_diffusers_version": "0.42.1",
    "sample_size": 8,
    "block_out_channels": [8, 8],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "add_attention": False,
}
ATTENTION = {
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "add_attention": True,
    "num_class_embeds": 4,
}
K = {
    "block_out_channels": [32, 32],
    "down_block_types": ["KDownBlock2D"] * 2,
    "up_block_types": ["KUpBlock2D"] * 2,
    "act_fn": "gelu",
}
SKIP = {
    "block_out_channels": [32, 32],
    "down_block_types": ["SkipDownBlock2D", "AttnSkipDownBlock2D"],
    "up_block_types": ["AttnSkipUpBlock2D", "SkipUpBlock2D"],
}
LEARNED = {"time_embedding_type": "learned", "num_train_timesteps": 10, "class_embed_type": "timestep"}
DIT = {
    "_class_name": "DiTTransformer2DModel",
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 6,
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "patch_size": 4,
    "num_embeds_ada_norm": 3,
}
VAE = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [8, 8],
    "norm_num_groups": 4,
    "sample_size": 16,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
}
POLICY = {
    "_class_name": "UNet1DModel",
    "sample_size": 8,
    "in_channels": 5,
    "out_channels": 5,
    "block_out_channels": [8, 32],
    "down_block_types": ["DownResnetBlock1D"] * 2,
    "up_block_types": ["UpResnetBlock1D"],
    "mid_block_type": "MidResTemporalBlock1D",
    "out_block_type": "OutConv1DBlock",
    "time_embedding_type": "positional",
    "use_timestep_embedding": True,
    "act_fn": "mish",
}
FOURIER = {
    "in_channels": 8,
    "out_channels": 8,
    "up_block_types": ["UpResnetBlock1D"] * 2,
    "out_block_type": None,
    "time_embedding_type": "fourier",
}
VALUES = {
    "up_block_types": [],
    "mid_block_type": "ValueFunctionMidBlock1D",
    "out_block_type": "ValueFunction",
    "downsample_each_block": True,
}
SD = {kind: {"_class_name": "UNet2DConditionModel"} | unet for kind, unet in UNETS.items()}
Z_IMAGE = {"_class_name": "ZImageTransformer2DModel"} | tiny.TRANSFORMER
MODELS = {config["_class_name"]: config for config in (UNET, DIT, POLICY, SD["sd1"], Z_IMAGE)}
SCHEDULER = {"num_train_timesteps": 10, "beta_start": 0.0001, "beta_end": 0.02, "clip_sample": True}
INFO = {
    "labels": ["cat", "dog", "red bird"],
    "label_groups": {"pets": ["cat", "dog"]},
    "replaced_labels": {"kitten": "cat"},
    "null_label": 3,
    "guidance_scale": 2.0,
    "num_inference_steps": 2,
    "scheduler": "ddim",
    "eta": 0.5,
    "use_clipped_model_output": False,
}

# Options that the tiny folders do not set
CONFIG_OPTIONS = {
    "UNet2DModel": """center_input_sample time_embedding_type time_embedding_dim freq_shift flip_sin_to_cos
    mid_block_type mid_block_scale_factor downsample_padding downsample_type upsample_type dropout act_fn
    attn_norm_num_groups norm_eps resnet_time_scale_shift class_embed_type num_class_embeds num_train_timesteps
    in_channels out_channels unknown""",
    "UNet1DModel": """sample_rate extra_in_channels flip_sin_to_cos freq_shift time_embedding_dim norm_num_groups
    layers_per_block downsample_each_block unknown""",
    "DiTTransformer2DModel": """dropout norm_num_groups attention_bias activation_fn upcast_attention norm_type
    norm_elementwise_affine norm_eps attention_type caption_channels unknown""",
    "UNet2DConditionModel": "unknown",  # diffusers writes every option
    "ZImageTransformer2DModel": "siglip_feat_dim unknown",
    "AutoencoderKL": """in_channels out_channels layers_per_block act_fn latent_channels scaling_factor shift_factor
    force_upcast use_quant_conv use_post_quant_conv mid_block_add_attention unknown""",
    "DDPMScheduler": """beta_schedule trained_betas prediction_type thresholding dynamic_thresholding_ratio
    clip_sample_range sample_max_value timestep_spacing steps_offset rescale_betas_zero_snr variance_type
    set_alpha_to_one _use_default_values unknown""",
}
CONFIG_OPTIONS["DDIMScheduler"] = CONFIG_OPTIONS["DDPMScheduler"]


class Kind(NamedTuple):
    """A model folder: its pipeline class (None for a model alone), its denoiser's config, and its weight files."""

    pipeline: str | None
    config: dict[str, Any]
    scheduler: str = "DDPMScheduler"
    extension: str = "safetensors"
    shards: int = 1
    variant: str | None = None
    info: dict[str, Any] | None = None
    companion: str | None = None  # vae or value_function: the other part with weights


KINDS = {
    "plain": Kind("DDPMPipeline", UNET),
    "attention": Kind("DDIMPipeline", UNET | ATTENTION, "DDIMScheduler", info=INFO),
    "k": Kind("DDPMPipeline", UNET | K, extension="bin"),
    "skip": Kind("DDIMPipeline", UNET | SKIP, "DDIMScheduler", shards=2),
    "learned": Kind("DDPMPipeline", UNET | LEARNED, extension="bin", shards=2),
    "fp16": Kind("DDPMPipeline", UNET | {"time_embedding_type": "fourier"}, variant="fp16"),
    "bare": Kind(None, UNET | {"center_input_sample": True, "resnet_time_scale_shift": "scale_shift"}),
    "dit": Kind("DiTPipeline", DIT, "DDIMScheduler", info={"null_label": 3, "labels": ["cat", "dog", "bird"]}),
    "dit-vae": Kind("DiTPipeline", DIT | {"in_channels": 4, "out_channels": 8}, "DDPMScheduler", companion="vae"),
    "policy": Kind("DDPMPipeline", POLICY),
    "fourier-policy": Kind("DDIMPipeline", POLICY | FOURIER, "DDIMScheduler", shards=2),
    "planner": Kind("ValueGuidedRLPipeline", POLICY, "DDIMScheduler", companion="value_function"),
    "bare-policy": Kind(None, POLICY | {"extra_in_channels": 1, "layers_per_block": 0}, extension="bin"),
    "values": Kind(None, POLICY | VALUES),
    "sd1": Kind("StableDiffusionPipeline", SD["sd1"]),
    "sd2": Kind("StableDiffusionPipeline", SD["sd2"], shards=2),
    "sdxl": Kind("StableDiffusionXLPipeline", SD["sdxl"]),
    "z-image": Kind("ZImagePipeline", Z_IMAGE, "FlowMatchEulerDiscreteScheduler"),
}
OF_PROMPTS = ("sd1", "sd2", "sdxl")  # made by tests.support.text_pipelines
LAYOUTS = {  # of their tokenizers
    "sd1": {"tokenizer": "one-file"},
    "sd2": {"tokenizer": "old"},
    "sdxl": {"tokenizer": "both", "tokenizer_2": "two-files"},
}
PLANNERS = [kind for kind, spec in KINDS.items() if spec.config["_class_name"] == "UNet1DModel" and spec.pipeline]

FOLDER_CALLS = [
    *(("command", what) for what in ("sample", "sample", "models", "verify", "bench")),
    *(("library", what) for what in ("pipeline", "model", "config", "scheduler")),
    *(("page", what) for what in ("generate", "models")),
]
PROMPT_CALLS = [
    *(("command", what) for what in ("sample", "sample", "models", "verify", "bench")),
    *(("library", what) for what in ("pipeline", "pipeline", "parts")),
    *(("page", what) for what in ("generate", "models")),
]
# Z-Image's usual size takes thousands of tokens, so a call that draws chooses another one
CAPTION_CALLS = [("command", "sample"), ("command", "sample"), ("command", "models"), ("command", "bench")]
SMALL = (("--height", "16"), ("--width", "16"))


def calls_of(kind: str) -> list[tuple[str, str]]:
    """Return the calls that every folder of a kind supports, as (door, what)."""
    if kind == "z-image":
        return CAPTION_CALLS
    return PROMPT_CALLS if kind in OF_PROMPTS else FOLDER_CALLS


def copy(kind: str, root: Path, folder: Path) -> None:
    """Copy a kind's folder to `folder` by hard links to the files of the original in `root`.

    Edits replace files, and never write into them.
    """
    shutil.copytree(_made(kind, root), folder, copy_function=os.link)


@cache
def _made(kind: str, root: Path) -> Path:
    folder, spec = root / kind, KINDS[kind]
    if kind == "z-image":
        tiny.pipeline(_with_random_weights).save_pretrained(folder)
        return folder
    if kind in OF_PROMPTS:
        _save_text_pipeline(folder, kind)
        return folder
    part = DENOISERS[spec.config["_class_name"]].part.name
    if spec.pipeline is None:
        _save_model(folder, spec.config, spec)
        return folder
    _save_model(folder / part, spec.config, spec)
    index: dict[str, Any] = {"_class_name": spec.pipeline, "scheduler": ["diffusers", spec.scheduler]}
    index[part] = ["diffusers", spec.config["_class_name"]]
    learned = (
        {"variance_type": "learned_range"} if spec.scheduler == "DDPMScheduler" and spec.companion == "vae" else {}
    )
    write_json(folder / "scheduler" / "scheduler_config.json", {"_class_name": spec.scheduler} | SCHEDULER | learned)
    if spec.pipeline == "DiTPipeline":
        index |= {
            "vae": ["diffusers", "AutoencoderKL"] if spec.companion else None,
            "id2label": {"0": "tench", "1": "x"},
        }
    if spec.companion == "vae":
        _save_autoencoder(folder / "vae")
    if spec.companion == "value_function":
        index |= {"value_function": ["diffusers", "UNet1DModel"], "env": [None, None]}
        _save_model(folder / "value_function", POLICY | VALUES, spec)
    if spec.info is not None:
        write_json(folder / "fastdiff.json", spec.info)
    write_json(folder / "model_index.json", index)
    return folder


def _save_model(folder: Path, config: dict[str, Any], spec: Kind) -> None:
    """Save a config and random weights with diffusers' names, in the files of a kind."""
    write_json(folder / "config.json", config)
    with torch.device("meta"):
        shapes = diffusers_shapes(DENOISERS[config["_class_name"]].from_config(config))
    generator = torch.Generator().manual_seed(0)
    state = {key: 0.1 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    names = file_names(spec)
    parts = [dict(list(state.items())[i :: len(names)]) for i in range(len(names))]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name) if spec.extension == "safetensors" else torch.save(part, folder / name)
    if spec.shards > 1:
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": 4 * sum(map(torch.numel, state.values()))}, "weight_map": places}
        write_json(folder / f"{STEM}.{spec.extension}.index.json", index)


def _save_autoencoder(folder: Path) -> None:
    from diffusers import AutoencoderKL

    _with_random_weights(AutoencoderKL.from_config(VAE)).save_pretrained(folder)


def _with_random_weights(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _save_text_pipeline(folder: Path, kind: str) -> None:
    """Save a tiny text-to-image pipeline whose tokenizers have different layouts.

    All parts of sd1 except the U-Net are .bin files. The parts of sd2 have sharded weights.
    """
    text_pipeline(kind).save_pretrained(folder, max_shard_size="100KB" if KINDS[kind].shards > 1 else "1GB")
    for name, layout in LAYOUTS[kind].items():
        shutil.rmtree(folder / name)
        save_tokenizer(folder / name, layout, pad="!" if name == "tokenizer_2" else "<|endoftext|>")
    if LAYOUTS[kind]["tokenizer"] == "old":
        write_json(folder / "tokenizer" / "added_tokens.json", {"<|endoftext|>": vocabulary()[0]["<|endoftext|>"]})
    for path in (folder / "vae" / f"{STEM}.safetensors", folder / "text_encoder" / "model.safetensors"):
        if kind == "sd1":
            torch.save(load_file(path), path.parent / f"{'pytorch_model' if path.stem == 'model' else STEM}.bin")
            path.unlink()


def file_names(spec: Kind) -> list[str]:
    """Return the names of a kind's weight files of the denoiser."""
    variant = f".{spec.variant}" if spec.variant else ""
    if spec.shards == 1:
        return [f"{STEM}{variant}.{spec.extension}"]
    return [f"{STEM}-{i:05d}-of-{spec.shards:05d}{variant}.{spec.extension}" for i in range(1, spec.shards + 1)]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))

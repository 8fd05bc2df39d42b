"""The model folder of emoji-sd: a StableDiffusionPipeline in float16 that diffusers and fastdiff load."""

import copy
import json
import shutil
import warnings
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTokenizer

from training.emoji_sd.unet import Denoiser

MOST_BYTES = 24 * 2**20
SCHEDULER = {
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",  # from pure noise
    "steps_offset": 1,  # StableDiffusionPipeline requires it; trailing steps ignore it
}


def make_pipeline(denoiser: Denoiser, vae: AutoencoderKL, tokenizer: CLIPTokenizer) -> StableDiffusionPipeline:
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=denoiser.text_encoder,
        tokenizer=tokenizer,
        unet=denoiser.unet,
        scheduler=DPMSolverMultistepScheduler(**SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_pipeline(denoiser: Denoiser, vae: AutoencoderKL, tokenizer: Path, folder: Path) -> int:
    """Write the folder in float16, with the tokenizer's files copied from `tokenizer`, and return its size in bytes.

    Warns if the folder is larger than MOST_BYTES.
    """
    halves = Denoiser(_half(denoiser.unet), _half(denoiser.text_encoder))
    halves.unet.register_to_config(dropout=0.0)
    make_pipeline(halves, _half(vae), CLIPTokenizer.from_pretrained(tokenizer)).save_pretrained(folder)
    # transformers 5 writes only a tokenizer.json, which transformers 4's CLIPTokenizer does not read.
    shutil.rmtree(folder / "tokenizer")
    shutil.copytree(tokenizer, folder / "tokenizer")
    _prefix_text_keys(folder / "text_encoder" / "model.safetensors")
    mend_configs(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        warnings.warn(f"{folder} has {size / 2**20:.1f} MiB, more than 24", stacklevel=2)
    return size


def _half(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("cpu", torch.float16).to(memory_format=torch.contiguous_format)


def _prefix_text_keys(path: Path) -> None:
    """Add transformers 4's prefix `text_model.` to the weights' names; transformers 5 reads both forms."""
    state = {f"text_model.{key.removeprefix('text_model.')}": value for key, value in load_file(path).items()}
    save_file(state, path, metadata={"format": "pt"})


def mend_configs(folder: Path) -> None:
    """Remove the VAE folder's path, and make float32 the text encoder's default dtype.

    diffusers loads its own models in float32 by default, but transformers 5 would load the float16 of the weights, and
    the two cannot be mixed.
    """
    _edit(folder / "vae" / "config.json", _name_or_path=None)
    _edit(folder / "text_encoder" / "config.json", dtype="float32")


def _edit(path: Path, **options: str | None) -> None:
    """Set options in a JSON file; None removes an option."""
    config = json.loads(path.read_text(encoding="utf-8")) | options
    config = {name: value for name, value in config.items() if name not in options or value is not None}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

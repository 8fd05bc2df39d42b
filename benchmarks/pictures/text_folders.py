"""Folders of Stable Diffusion 1.5 and XL as diffusers saves them, with random weights in bfloat16.

The tokenizer's vocabulary is single bytes, which does not change the cost of a prompt.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn

from benchmarks.models import stable_diffusion as sd
from fastdiff.tuning.timing import DEVICE

START, END = "<|startoftext|>", "<|endoftext|>"


class Reference(NamedTuple):
    """A picture of a few steps in float32, and the noise that it starts from."""

    latents: Tensor  # (1, C, h, w) bfloat16
    picture: Tensor  # (1, 3, H, W) in [0, 1]


@torch.no_grad()
def save_folder(name: str, folder: Path, draw: Callable[[Any, Tensor], Tensor]) -> Reference:
    """Save a pipeline of PIPELINES; return latents and the picture of `draw(pipe, latents)` in float32."""
    pipe = random_pipeline(name, folder / "bytes").to(torch.bfloat16)
    pipe.save_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    latents = torch.randn(1, 4, *(2 * (pipe.unet.config.sample_size,)), device=DEVICE).bfloat16()
    return Reference(latents, draw(pipe.to(torch.float32), latents.float()))


def random_pipeline(name: str, tokenizer: Path) -> Any:
    """Return a pipeline of PIPELINES in float32, of diffusers. Its tokenizer is saved into a folder."""
    torch.manual_seed(0)
    return PIPELINES[name](save_tokenizer(tokenizer))


def save_tokenizer(folder: Path) -> transformers.CLIPTokenizer:
    """Save CLIP's tokenizer without merges: a token for each byte inside a word, and one for each at its end."""
    letters = ["!", *sorted(set(ByteLevel.alphabet()) - {"!"})]  # "!" is token 0, as in CLIP
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    named = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    config = named | {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.CLIPTokenizer.from_pretrained(folder)


def sd15(tokenizer: Any) -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=random_model(diffusers.AutoencoderKL, sd.SD15_VAE),
        text_encoder=random_model(transformers.CLIPTextModel, sd.SD15_TEXT),
        tokenizer=tokenizer,
        unet=random_model(diffusers.UNet2DConditionModel, sd.SD15),
        scheduler=diffusers.PNDMScheduler(**sd.SD15_SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(tokenizer: Any, **unet: int) -> Any:
    """Return the pipeline. `unet` has entries of the U-Net's config."""
    return diffusers.StableDiffusionXLPipeline(
        vae=random_model(diffusers.AutoencoderKL, sd.SDXL_VAE),
        text_encoder=random_model(transformers.CLIPTextModel, sd.SD15_TEXT),
        text_encoder_2=random_model(transformers.CLIPTextModelWithProjection, sd.SDXL_TEXT_2),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=random_model(diffusers.UNet2DConditionModel, sd.SDXL | unet),
        scheduler=diffusers.EulerDiscreteScheduler(**sd.SDXL_SCHEDULER),
        add_watermarker=False,
    )


PIPELINES: dict[str, Callable[[Any], Any]] = {"sd15": sd15, "sdxl": sdxl}


def random_model(kind: Any, config: dict[str, Any]) -> nn.Module:
    with DEVICE:  # the CPU takes long to draw the numbers of a large model
        of_clip = kind.__name__.startswith("CLIP")
        return (kind(transformers.CLIPTextConfig(**config)) if of_clip else kind(**config)).eval()

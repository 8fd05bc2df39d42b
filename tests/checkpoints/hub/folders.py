"""Model folders with only the contents that the name resolver reads."""

import json
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STEM = "diffusion_pytorch_model"
INDEX = {
    "_class_name": "DDIMPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "unet": ["diffusers", "UNet2DModel"],
}

DIT_INDEX = {
    "_class_name": "DiTPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "transformer": ["diffusers", "DiTTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


SD_INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
}


def write(folder: Path, *names: str, index: dict | None = INDEX) -> Path:
    """Make a folder with these files, with only the contents that the name resolver reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"_class_name": "UNet2DModel"} if name.endswith("config.json") else {}))
    if index is not None:
        (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def assert_one_line(error, *named: str) -> None:
    message = str(error.value)
    assert all(name in message for name in named), message
    assert len(message.splitlines()) == 1

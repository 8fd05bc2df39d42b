"""The ControlNet of emoji-sd: its shape, its folder, and the prediction that it takes part in."""

import copy
import json
from pathlib import Path

import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

EMBEDDING = (16, 32, 96, 256)  # channels of the condition embedding, an entry for each level of the VAE
MOST_BYTES = 7 * 2**20


def build_controlnet(pipeline: StableDiffusionPipeline) -> ControlNetModel:
    """Build a ControlNet that starts as the encoder of a pipeline's U-Net, with zero convolutions.

    Each entry of the condition embedding but the first halves the control picture, as each level of the VAE does.
    emoji-sd's VAE has three levels, so that a picture of 128x128 pixels has latents of 32x32.
    """
    levels = len(pipeline.vae.config.block_out_channels)
    return ControlNetModel.from_unet(pipeline.unet, conditioning_embedding_out_channels=EMBEDDING[:levels])


def save_controlnet(controlnet: ControlNetModel, folder: Path) -> int:
    """Write the weights in float16 as a diffusers folder, and return its size in bytes."""
    half = copy.deepcopy(controlnet).to("cpu", torch.float16).to(memory_format=torch.contiguous_format)
    half.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # a folder of this machine
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


def load_controlnet(folder: Path, device: torch.device | str) -> ControlNetModel:
    """Load a folder of `save_controlnet` in float32."""
    options = {"torch_dtype": torch.float32, "low_cpu_mem_usage": False}
    return ControlNetModel.from_pretrained(folder, **options).to(device).eval()


def controlled_pipeline(
    pipeline: StableDiffusionPipeline, controlnet: ControlNetModel
) -> StableDiffusionControlNetPipeline:
    """Return a pipeline with the same parts and a ControlNet."""
    controlled = StableDiffusionControlNetPipeline(
        **pipeline.components, controlnet=controlnet, requires_safety_checker=False
    )
    controlled.set_progress_bar_config(disable=True)
    return controlled


class Frozen(nn.Module):
    """The U-Net and text encoder of emoji-sd, which are not trained."""

    def __init__(self, unet: UNet2DConditionModel, text_encoder: CLIPTextModel):
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder
        self.eval().requires_grad_(False)

    def forward(self, controlnet: nn.Module, x_t: Tensor, t: Tensor, tokens: Tensor, control: Tensor) -> Tensor:
        """Predict v (N, C, h, w) from x_t (N, C, h, w), t (N,), tokens (N, L) and control (N, 3, S, S) in 0..1."""
        with torch.no_grad():
            text = self.text_encoder(tokens).last_hidden_state  # (N, L, width)
        down, middle = controlnet(x_t, t, text, control, return_dict=False)
        return self.unet(
            x_t, t, text, down_block_additional_residuals=down, mid_block_additional_residual=middle
        ).sample

"""emoji64's UNet2DModel: how it is built, and how it is written as a model folder."""

import copy
import json
from pathlib import Path

import torch
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel
from torch import nn

from training.data import SIZE
from training.diffusion import SCHEDULER
from training.labels import Labels

CHANNELS = (48, 96, 128, 128)
DEFAULTS = {
    "guidance_scale": 4.0,
    "num_inference_steps": 50,
    "scheduler": "ddim",
    "eta": 0.0,
    "use_clipped_model_output": True,
}


def build_unet(labels: Labels, channels: tuple[int, ...] = CHANNELS, dropout: float = 0.0) -> UNet2DModel:
    """A new UNet2DModel with one class embedding per label and one for the null label."""
    unet = UNet2DModel(
        sample_size=SIZE,
        block_out_channels=channels,
        layers_per_block=2,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=32,
        norm_num_groups=16,
        num_class_embeds=len(labels.names) + 1,
        dropout=dropout,
    )
    _zero_residual_ends(unet)
    with torch.no_grad():
        unet.class_embedding.weight.copy_(_related_embeddings(labels, unet.class_embedding.embedding_dim))
    return unet


def _zero_residual_ends(unet: UNet2DModel) -> None:
    """Every residual branch starts as the identity, and the prediction as zero."""
    ends: list[nn.Module] = [unet.conv_out]
    for name, module in unet.named_modules():
        if name.endswith((".conv2", ".to_out.0")):
            ends.append(module)
    for module in ends:
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)


def _related_embeddings(labels: Labels, width: int) -> torch.Tensor:
    """(labels + 1, width): style vector + group vector + own vector, so labels that share a part start alike."""
    vectors: dict[str, torch.Tensor] = {}

    def vector(part: str) -> torch.Tensor:
        return vectors.setdefault(part, torch.randn(width) / 3**0.5)

    group_of = {name: coarse for coarse, members in labels.groups.items() for name in members}
    rows = []
    for name in labels.names:
        style, group = group_of[name].split(" ")  # "noto animals"
        rows.append(vector(style) + vector(group) + vector(name.removeprefix(style)))
    return torch.stack([*rows, torch.zeros(width)])


def save_model(unet: UNet2DModel, labels: Labels, folder: Path) -> None:
    """Write the model in float16 as a diffusers DDIMPipeline folder, with label names and defaults in fastdiff.json."""
    unet = copy.deepcopy(unet).to("cpu", torch.float16).to(memory_format=torch.contiguous_format)
    unet.register_to_config(dropout=0.0)
    DDIMPipeline(unet, DDIMScheduler(**SCHEDULER)).save_pretrained(folder)
    info = {
        "labels": labels.names,
        "null_label": labels.null_label,
        "label_groups": labels.groups,
        "replaced_labels": labels.replaced,
        **DEFAULTS,
    }
    (folder / "fastdiff.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")

"""Random LoRAs for tiny U-Nets, with the names that diffusers saves."""

import math

import torch
from torch import Tensor, nn

TARGETS = (  # products, convolutions of 1 x 1 and 3 x 3, one with a stride, and layers that read time and text
    "attn1.to_q",
    "attn1.to_v",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
    "ff.net.0.proj",
    "proj_in",
    "resnets.0.conv1",
    "time_emb_proj",
    "conv_shortcut",
    "downsamplers.0.conv",
    "upsamplers.0.conv",
    "conv_in",
    "time_embedding.linear_1",
)


def random_lora(unet: nn.Module, seed: int, rank: int = 4, targets: tuple[str, ...] = TARGETS) -> dict[str, Tensor]:
    """Return the state dict of a LoRA that changes the pictures."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for path, module in unet.named_modules():
        name = path.removesuffix(".base_layer")  # if another LoRA is loaded
        if isinstance(module, nn.Linear | nn.Conv2d) and name.endswith(targets):
            outs, ins, *window = module.weight.shape
            down, up = (rank, ins, *window), (outs, rank, *(1 for _ in window))
            size = math.sqrt(ins * math.prod(window))
            state[f"unet.{name}.lora_A.weight"] = torch.randn(down, generator=generator) / size
            state[f"unet.{name}.lora_B.weight"] = 0.3 * torch.randn(up, generator=generator) / math.sqrt(rank)
    return state

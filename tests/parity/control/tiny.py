"""Tiny ControlNets of diffusers and ours with the same weights."""

import diffusers
import torch

from fastdiff import ControlNetModel
from fastdiff.checkpoints.weights import load_weights
from tests.parity.text_unets.tiny_model import SD

NAMES = {"sample_size", "up_block_types", "out_channels"}  # options of the U-Net alone


def control_config(unet: dict, **changes) -> dict:
    """Return the config of a ControlNet for a U-Net, with three widths: its pictures are 4 times larger."""
    own = {name: value for name, value in unet.items() if name not in NAMES}
    return own | {"conditioning_embedding_out_channels": (8, 12, 16)} | changes


def control_pair(randomise, config: dict | None = None, seed: int = 0):
    """Return diffusers' ControlNetModel of a config, and ours with the same weights."""
    theirs = randomise(diffusers.ControlNetModel(**config or control_config(SD)), seed)
    for module in theirs.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data += 1
    with torch.device("meta"):
        ours = ControlNetModel.from_config(theirs.config)
    load_weights(ours, theirs.state_dict(), source="model", dtype=torch.float32, device="cpu")
    return theirs, ours

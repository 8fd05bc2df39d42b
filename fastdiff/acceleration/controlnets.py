"""Control pictures of live pipelines, which a loop of diffusers gives its ControlNet again at each step."""

import torch
from torch import Tensor, nn

from fastdiff.acceleration.recall import Kept, place_in_vector, places_of
from fastdiff.execution.replaying.trees import Fixed
from fastdiff.models.controlnet import ControlNetModel

EMBEDDING = "controlnet_cond_embedding."


class ControlReader:
    """Embeds the control pictures of a loop once; it is the `control_reader` of our ControlNet."""

    def __init__(self, model: nn.Module, ours: ControlNetModel):
        names = (name for name in ours.state_dict() if name.startswith(EMBEDDING))
        self._kept: Kept[Fixed] = Kept(places_of(model, ours, names))

    def __call__(self, net: ControlNetModel, condition: Tensor, timestep: Tensor) -> Fixed | None:
        """Return `embed_condition` of pictures (N, conditioning_channels, H, W), or None if the call is in no loop.

        It is the same object in each call of a loop, so that a graph copies it at the first step only.
        """
        if place_in_vector(timestep) is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            return self._kept.find([condition], lambda: Fixed((net.embed_condition(net.pixels(condition)),)))

    def begin(self) -> None:
        """Embed the pictures of the next call anew, whether or not torch has counted writes."""
        self._kept.begin()

    def forget(self) -> None:
        """Drop all embedded pictures."""
        self._kept.forget()

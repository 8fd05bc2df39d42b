"""ControlledUNet: a text U-Net with ControlNets, as one model of the sampling loop."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fastdiff.execution.replaying.trees import map_tensors
from fastdiff.models.blocks.conditioning import Conditioning, Prompt
from fastdiff.models.blocks.layers import Feature
from fastdiff.models.controlnet import ControlNetModel, Filters
from fastdiff.models.text_denoiser import TextDenoiser
from fastdiff.models.unet2d_condition import UNet2DConditionModel

# What a ControlNet reads besides what the U-Net reads: `embed_condition` (n, H, W, C) and `filters`
Control = tuple[Tensor, Filters]


class ControlledUNet:
    """A U-Net with the ControlNets that are on. It fits `DenoiserLike`, and `predict` takes a Control for each.

    `Conditioning.temb` has the columns of the U-Net and then of each ControlNet, and `Conditioning.text` a tuple for
    each of them.
    """

    joins_halves: ClassVar[bool] = True

    def __init__(self, unet: UNet2DConditionModel, nets: Sequence[ControlNetModel]):
        self.unet, self.nets = unet, tuple(nets)
        self._models: tuple[TextDenoiser, ...] = (unet, *nets)
        self._widths = [model.conditioning_width for model in self._models]
        self.conditioning_width = sum(self._widths)

    @property
    def embeds_prompt(self) -> bool:
        """See DenoiserLike."""
        return any(model.embeds_prompt for model in self._models)

    @property
    def dtype(self) -> torch.dtype:
        return self.unet.dtype

    @property
    def device(self) -> torch.device:
        return self.unet.device

    @property
    def weights_state(self) -> Hashable:
        return self.unet.weights_state

    def embed(self, timesteps: Tensor, class_labels: Tensor | None, prompt: Prompt | None) -> Tensor:
        """See DenoiserLike."""
        return torch.cat(
            [
                self.unet.embed(timesteps, class_labels, prompt),
                *(net.embed(timesteps, None, prompt and _own(prompt)) for net in self.nets),
            ],
            dim=1,
        )

    def project(self, prompt: Prompt) -> tuple[Any, ...]:
        """See DenoiserLike. The result has a tuple for each model."""
        return tuple(model.project(_own(prompt)) for model in self._models)

    @torch.no_grad()
    def predict(self, x: Tensor, conditioning: Conditioning, *controls: Control) -> Tensor:
        """Return the U-Net's prediction (N, H, W, C_out), contiguous, for x (N, H, W, C_in).

        With controls of n < N pictures, the ControlNets run on the first n pictures, and the others are predicted
        without them.
        """
        tembs, texts = conditioning.temb.split(self._widths, dim=1), cast(tuple[Any, ...], conditioning.text)
        own, *parts = (conditioning._replace(temb=temb, text=text) for temb, text in zip(tembs, texts, strict=True))
        outputs, context = self.unet.encode(x, own)
        n = len(controls[0][0])
        first = outputs if n == len(x) else [Feature(each.x[:n]) for each in outputs]
        for net, part, control in zip(self.nets, parts, controls, strict=True):
            state = x[:n, ..., : net.config.in_channels].contiguous()  # of an inpainting model, x_t alone
            first = net.add_to(first, state, map_tensors(lambda each: each[:n], part), *control)
        if n < len(x):
            first = [Feature(torch.cat([new.x, old.x[n:]])) for new, old in zip(first, outputs, strict=True)]
        return self.unet.decode(first, context)

    def graphed(self, name: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
        """See DenoiserLike. The U-Net keeps the graphs."""
        return self.unet.graphed((name, *(net.place for net in self.nets)), function)


def _own(prompt: Prompt | None) -> Prompt:
    """Return what a ControlNet reads of a prompt: everything but the embedded guidance scale of LCM."""
    assert prompt is not None  # guaranteed by the callers
    return prompt._replace(timestep_cond=())

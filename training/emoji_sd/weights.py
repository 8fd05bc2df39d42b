"""The weights of a training, their moving average and the optimiser, which a checkpoint holds."""

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

EMA_DECAY = 0.999
GRADIENT_NORM = 1.0


class Weights:
    """A model in training. `ema` is measured and published; `step` counts the optimiser's steps."""

    def __init__(self, model: nn.Module, weight_decay: float):
        self.model = model
        self.ema = copy.deepcopy(model).eval().requires_grad_(False)
        on_gpu = next(model.parameters()).is_cuda
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=weight_decay, fused=on_gpu
        )
        self.step = 0

    def update(self, loss: Tensor, learning_rate: float) -> None:
        """Make one optimiser step on the loss, without reading it back."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(_list(self.ema.parameters()), _list(self.model.parameters()), 1 - decay)
        self.step += 1

    def save(self, path: Path) -> None:
        state = {key: getattr(self, key).state_dict() for key in ("model", "ema", "optimiser")}
        torch.save(state | {"step": self.step}, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=next(self.model.parameters()).device, weights_only=True)
        for key in ("model", "ema", "optimiser"):
            getattr(self, key).load_state_dict(state[key])
        self.step = state["step"]


def _list(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [*parameters]

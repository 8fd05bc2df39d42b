"""The perceptual loss of the VAE's training: the distance of two pictures in the features of a classifier.

When two errors have the same L1, the features distinguish a blurred edge from a moved one. The classifier predicts
style x group and is trained here, on the training pictures only.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.classifier import LEARNING_RATE, WIDTHS, Classifier, load_classifier
from training.emoji_sd.data import Pictures, Sampler

STEPS, BATCH = 600, 128
EPSILON = 1e-2  # feature vectors shorter than this are not normalised to length 1: flat areas


class Features(nn.Module):
    """The last feature map of each of a classifier's four widths, with frozen weights."""

    def __init__(self, classifier: Classifier):
        super().__init__()
        self.blocks = classifier.blocks.eval().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared distance of the maps, with each position's features normalised to length 1.

        x and y (N, 3, H, W) in -1..1. Source: Zhang et al. 2018 (arXiv 1801.03924), equation 1, without its weights.
        """
        total = x.new_zeros(())
        for i, block in enumerate(self.blocks):
            x, y = block(x), block(y)
            if i % 2 == 1:
                total = total + (_unit(x) - _unit(y)).square().sum(dim=1).mean()
        return total


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=1, eps=EPSILON)


def train_classifier(pictures: Pictures, steps: int, batch: int = BATCH, widths: Sequence[int] = WIDTHS) -> Classifier:
    """Train on shifted pictures with cross entropy, under bfloat16 autocast."""
    torch.manual_seed(0)
    device = pictures.images.device
    model = Classifier(widths).to(device, memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
    draw = Sampler(pictures)
    for _ in range(steps):
        indices, images = draw(batch)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), pictures.kinds[indices])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def make_features(
    pictures: Pictures, path: Path, steps: int, batch: int = BATCH, widths: Sequence[int] = WIDTHS
) -> Features:
    """Return the features of the classifier at `path`. Train it first if the file does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(train_classifier(pictures, steps, batch, widths).state_dict(), path)
    device = pictures.images.device
    return Features(load_classifier(path, device)).to(memory_format=torch.channels_last)

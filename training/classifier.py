"""A small classifier of emoji by style and group, which judges samples: a residual network on 64x64 pictures.

`python -m training.classifier --data emoji64.npz --out classifier.pt` trains it on the training pictures only and
prints its accuracy on the validation pictures, which no model here has seen.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.data import Augmenter, Pictures, load, to_model_range
from training.diffusion import picture_distribution, stratified_draw

CLASSES = 36  # style * 9 + group
WIDTHS = (32, 64, 128, 256)
STEPS, BATCH, LEARNING_RATE = 2000, 256, 2e-3


class Block(nn.Module):
    def __init__(self, channels: int, out_channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class Classifier(nn.Module):
    def __init__(self, widths: Sequence[int] = WIDTHS):
        super().__init__()
        blocks, channels = [], 3
        for i, width in enumerate(widths):
            blocks += [Block(channels, width, 1 if i == 0 else 2), Block(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(channels, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        """Map (N, 3, 64, 64) uint8 to (N, 256) float32: the mean over positions before the head."""
        return self.blocks(to_model_range(images)).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, 3, 64, 64) uint8 to (N, 36) logits."""
        return self.head(self.dropout(self.features(images)))


def train_classifier(train: Pictures, steps: int = STEPS, batch: int = BATCH, seed: int = 0) -> Classifier:
    """Train with cross entropy on shifted and scaled pictures; a label's weight is the square root of its count."""
    torch.manual_seed(seed)
    model = Classifier().to(train.images.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
    augment, distribution = Augmenter(train.images), picture_distribution(train.coarse)
    for _ in range(steps):
        indices = stratified_draw(distribution, batch)
        loss = F.cross_entropy(model(augment(indices)), train.coarse[indices])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def judge(model: Classifier, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 probabilities (N, 36) and features (N, 256) of pictures (N, 3, 64, 64) uint8."""
    features = torch.cat([model.features(part) for part in images.split(1024)])
    return model.head(features).softmax(dim=1), features


def load_classifier(path: Path, device: torch.device | str) -> Classifier:
    weights = torch.load(path, map_location=device, weights_only=True)
    widths = [len(bias) for key, bias in weights.items() if key.endswith("norm2.bias")][::2]  # two blocks per width
    model = Classifier(widths).to(device)
    model.load_state_dict(weights)
    return model.eval()


def accuracy(model: Classifier, pictures: Pictures) -> float:
    probabilities, _ = judge(model, pictures.images)
    return (probabilities.argmax(dim=1) == pictures.coarse).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji64.npz")
    parser.add_argument("--out", type=Path, required=True, help="file for the weights")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    train, validation, _ = load(args.data, args.device)
    model = train_classifier(train, steps=args.steps)
    torch.save(model.state_dict(), args.out)
    print(f"accuracy: training {accuracy(model, train):.4f}, validation {accuracy(model, validation):.4f}")


if __name__ == "__main__":
    main()

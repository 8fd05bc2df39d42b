"""Load emoji64.npz: the training pictures with their shifted and scaled copies, and the validation pictures."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training.labels import Labels, make_labels

SIZE = 64
SCALED_SIZES = (58, 59, 60, 61, 62)


@dataclass(frozen=True)
class Pictures:
    """The pictures of one split, on a device."""

    images: Tensor  # (N, 3, 64, 64) uint8
    labels: Tensor  # (N,) int64, the finer label
    coarse: Tensor  # (N,) int64, style * 9 + group

    def __len__(self) -> int:
        return len(self.labels)


def load(path: Path, device: torch.device | str) -> tuple[Pictures, Pictures, Labels]:
    """Read emoji64.npz into (training pictures, validation pictures, labels). Labels count training pictures only."""
    with np.load(path) as arrays:
        data = {key: arrays[key] for key in arrays.files}
    styles = data["style_names"][data["style"]].tolist()
    groups = data["group_names"][data["group"]].tolist()
    validation = data["validation"]
    labels = make_labels(styles, groups, data["name"].tolist(), (~validation).tolist())
    coarse = data["style"].astype(np.int64) * len(data["group_names"]) + data["group"]
    images = torch.from_numpy(data["images"]).permute(0, 3, 1, 2)

    def split(mask: np.ndarray) -> Pictures:
        chosen = torch.from_numpy(mask)
        return Pictures(
            images=images[chosen].contiguous().to(device),
            labels=torch.tensor(labels.of_picture)[chosen].to(device),
            coarse=torch.from_numpy(coarse)[chosen].to(device),
        )

    return split(~validation), split(validation), labels


def to_model_range(images: Tensor) -> Tensor:
    """Map uint8 0..255 to float32 -1..1 of the same shape."""
    return images.float() / 127.5 - 1


def to_bytes(x_0: Tensor) -> Tensor:
    """Map (N, 3, H, W) float -1..1 to (N, H, W, 3) uint8 on the CPU."""
    return ((x_0.float() + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu()


def scaled_copies(images: Tensor) -> Tensor:
    """Return (5, N, 3, 64, 64) uint8: each picture (N, 3, 64, 64) at 58 to 62 px, at the top left of a white frame."""
    copies = []
    for size in SCALED_SIZES:
        small = F.interpolate(images.float(), size=(size, size), mode="bicubic", antialias=True)
        frame = F.pad(small, (0, SIZE - size, 0, SIZE - size), value=255)
        copies.append(frame.round().clamp(0, 255).byte())
    return torch.stack(copies)


class Augmenter:
    """Keep half of the pictures, and scale half to 58 to 62 px and shift them inside the frame; no crops, no flips.

    The scaled copies are made once, so a batch needs two gathers and no read-back from the device.
    """

    def __init__(self, images: Tensor):
        self.frames = torch.cat([images[None], scaled_copies(images)])  # (6, N, 3, 64, 64)
        sizes = (SIZE, *SCALED_SIZES)
        self.margins = torch.tensor([SIZE - size for size in sizes], device=images.device)

    def __call__(self, indices: Tensor) -> Tensor:
        """Return (B, 3, 64, 64) uint8 for picture indices (B,). Draws from torch's default generator."""
        count, device = len(indices), indices.device
        kind = torch.randint(1, len(self.margins), (count,), device=device)
        kind = torch.where(torch.rand(count, device=device) < 0.5, kind, 0)
        shift = torch.rand(2, count, device=device) * (self.margins[kind] + 1)  # (2, B)
        positions = torch.arange(SIZE, device=device)
        # The frame's right and bottom margins are white, so a cyclic roll of at most the margin is a shift.
        rows, columns = (positions - shift.long()[..., None]) % SIZE  # (B, 64) each
        frames = self.frames[kind, indices]
        batch = torch.arange(count, device=device)[:, None, None]
        return frames.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

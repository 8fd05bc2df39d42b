"""Control pictures of emoji and their augmented copies, and the agreement of a drawn picture with its edges."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastdiff.edges import HIGH, LOW, canny
from training.emoji_sd.data import MARGIN

PART = 64  # pictures whose edges are computed at once
SMALLEST, STEP = 72, 8  # sides of the scaled copies, in pixels of a frame of 128


def edges_of(images: Tensor, low: int = LOW, high: int = HIGH) -> Tensor:
    """Return where pictures have edges: (N, 3, S, S) uint8 -> (N, 1, S, S) bool on the CPU."""
    parts = [part.permute(0, 2, 3, 1).numpy() for part in images.cpu().split(PART)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = threads.map(lambda part: canny(part, low, high), parts)
    return torch.from_numpy(np.concatenate([*found]))[:, None]


def control_pictures(edges: Tensor) -> Tensor:
    """Return edges (N, 1, S, S) bool in white on black: (N, 3, S, S) uint8."""
    return 255 * edges.byte().expand(-1, 3, -1, -1)


def augmented(images: Tensor, *, scaled: bool) -> Tensor:
    """Mirror half of the pictures (N, 3, S, S) uint8, and move each.

    A picture is shifted by -4 to 4 pixels. With `scaled`, it is shrunk and placed on white as a whole. Draws from
    torch's default generator on the CPU.
    """
    count, side = len(images), images.shape[-1]
    mirrored = torch.rand(count) < 0.5
    images = torch.where(mirrored[:, None, None, None].to(images.device), images.flip(3), images)
    if not scaled:
        return rolled(images, torch.randint(-MARGIN, MARGIN + 1, (2, count)))
    sizes = torch.arange(side * SMALLEST // 128, side, side * STEP // 128)
    chosen = sizes[torch.randint(len(sizes), (count,))]
    framed = torch.empty_like(images)
    for size in sizes.tolist():
        rows = (chosen == size).nonzero()[:, 0].to(images.device)
        if len(rows):
            framed[rows] = shrunk(images[rows], size)
    return rolled(framed, (torch.rand(2, count) * (side - chosen + 1)).long())


def shrunk(images: Tensor, size: int) -> Tensor:
    """Return pictures (N, 3, S, S) uint8 with a side of `size` pixels, at the top left of a white frame."""
    small = F.interpolate(images.float(), size=(size, size), mode="bicubic", antialias=True)
    rest = images.shape[-1] - size
    return F.pad(small, (0, rest, 0, rest), value=255).round().clamp(0, 255).byte()


def rolled(images: Tensor, shift: Tensor) -> Tensor:
    """Roll each picture of (N, C, S, S) by shift (2, N) pixels down and to the right."""
    count, side, device = len(images), images.shape[-1], images.device
    rows, columns = (torch.arange(side) - shift[..., None]).to(device) % side  # (N, S) each
    batch = torch.arange(count, device=device)[:, None, None]
    return images.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def agreement(drawn: Tensor, wanted: Tensor) -> dict[str, float]:
    """Compare edges (N, 1, S, S) bool with the wanted ones, with a tolerance of one pixel, corners included.

    precision is the share of drawn edge pixels next to a wanted one, recall the share of wanted pixels next to a drawn
    one, and f1 their harmonic mean; each is pooled over all pictures.
    """
    precision, recall = _share_near(drawn, wanted), _share_near(wanted, drawn)
    f1 = 2 * precision * recall / max(precision + recall, 1e-9)
    return {"precision": precision, "recall": recall, "f1": f1}


def _share_near(edges: Tensor, others: Tensor) -> float:
    near = F.max_pool2d(others.float(), 3, stride=1, padding=1) > 0
    return (edges & near).sum().item() / max(edges.sum().item(), 1)

"""Contact sheets of pictures."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

GAP = 4
COLUMNS = 10


def save_pairs(real: Tensor, made: Tensor, path: Path) -> None:
    """Write (N, 3, H, W) uint8 pictures, each above its reconstruction, into one PNG on white."""
    save_sheet(torch.cat([real, made], dim=2), COLUMNS, path)


def save_sheet(images: Tensor, columns: int, path: Path) -> None:
    """Write (N, 3, H, W) uint8 pictures row by row into one PNG on white."""
    height, width = (side + GAP for side in images.shape[2:])
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), "white")
    for i, image in enumerate(images.permute(0, 2, 3, 1).cpu().numpy()):
        sheet.paste(Image.fromarray(image), (GAP + i % columns * width, GAP + i // columns * height))
    sheet.save(path)

"""Load emoji128.npz: pictures with their words in three splits, and batches of them.

The splits are `train`; `held_out`, whose names training sees only in the other three styles; and `validation`, whole
emoji families that no training picture shows.
"""

import io
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from training.diffusion import picture_distribution, stratified_draw

SIZE = 128
MARGIN = 4  # the outer 4 pixels are white, so a cyclic roll by this much is a shift
HELD_OUT_NAMES = 128  # equally many in each of the four styles
SPLIT_SEED = 0


@dataclass(frozen=True)
class Words:
    """The words of one picture, as the file spells them."""

    name: str  # "woman: dark skin tone, curly hair"
    style: str  # "fluent_3d"
    group: str  # "People & Body"
    keywords: tuple[str, ...]  # roughly the most descriptive first

    @property
    def is_toned(self) -> bool:
        return "skin tone" in self.name


@dataclass(frozen=True)
class Pictures:
    """The pictures of one split on a device, with their words."""

    images: Tensor  # (N, 3, S, S) uint8, S is 128
    kinds: Tensor  # (N,) int64, style * 9 + group
    words: tuple[Words, ...]

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True)
class Splits:
    train: Pictures
    held_out: Pictures
    validation: Pictures


class Sampler:
    """Draw batches in which the weight of a kind (style x group) is the square root of its count."""

    def __init__(self, pictures: Pictures):
        self.images = pictures.images
        self.distribution = picture_distribution(pictures.kinds)

    def __call__(self, count: int) -> tuple[Tensor, Tensor]:
        """Return indices (B,) int64 and their pictures (B, 3, S, S) uint8, each shifted by up to MARGIN pixels.

        Draws from torch's default generator, without a read-back from the device.
        """
        indices = stratified_draw(self.distribution, count)
        return indices, shifted(self.images[indices])


def load(path: Path, device: torch.device | str) -> Splits:
    """Read emoji128.npz into its splits, the pictures on the device."""
    with np.load(path) as arrays:
        data = {key: arrays[key] for key in arrays.files}
    words = picture_words(data)
    kinds = torch.from_numpy(data["style"].astype(np.int64) * len(data["group_names"]) + data["group"])
    images = decoded(data["webp"], data["offsets"])

    def split(rows: Sequence[int]) -> Pictures:
        chosen = torch.tensor(rows, dtype=torch.int64)
        return Pictures(images[chosen].to(device), kinds[chosen].to(device), tuple(words[row] for row in rows))

    held_out = held_out_rows(words, data["validation"].tolist())
    seen = [row for row in range(len(words)) if row not in held_out and not data["validation"][row]]
    return Splits(split(seen), split(sorted(held_out)), split(np.flatnonzero(data["validation"]).tolist()))


def picture_words(data: dict[str, np.ndarray]) -> list[Words]:
    """Return the words of every picture, in the file's order."""
    styles = data["style_names"][data["style"]].tolist()
    groups = data["group_names"][data["group"]].tolist()
    rows = zip(data["name"].tolist(), styles, groups, data["keywords"].tolist(), strict=True)
    return [Words(name, style, group, tuple(keywords.split(", "))) for name, style, group, keywords in rows]


def decoded(webp: np.ndarray, offsets: np.ndarray) -> Tensor:
    """Decode concatenated WebP files of one size, file i at webp[offsets[i]:offsets[i + 1]], to (N, 3, S, S) uint8."""

    def opened(i: int) -> Image.Image:
        return Image.open(io.BytesIO(webp[offsets[i] : offsets[i + 1]].tobytes()))

    width, height = opened(0).size
    images = torch.empty(len(offsets) - 1, 3, height, width, dtype=torch.uint8)
    for i, image in enumerate(images):
        image.copy_(torch.from_numpy(np.array(opened(i).convert("RGB"))).permute(2, 0, 1))
    return images


def held_out_rows(words: Sequence[Words], validation: Sequence[bool]) -> set[int]:
    """Return the rows whose name is held out in their style only.

    The names are drawn by a fixed seed from those that all four styles have, without a skin tone. Names with toned
    variants are excluded, because the variants would show what is held out.
    """
    toned = {word.name.split(":")[0] for word in words if word.is_toned}
    rows: dict[str, dict[str, int]] = {}
    for row, word in enumerate(words):
        if not validation[row] and word.name.split(":")[0] not in toned:
            rows.setdefault(word.name, {})[word.style] = row
    styles = sorted({word.style for word in words})
    names = sorted(name for name, by_style in rows.items() if len(by_style) == len(styles))
    drawn = random.Random(SPLIT_SEED).sample(names, min(HELD_OUT_NAMES, len(names) // 2))
    return {rows[name][styles[i % len(styles)]] for i, name in enumerate(drawn)}


def plain_names(words: Iterable[Words]) -> list[str]:
    """Return the distinct names without a skin tone, in alphabetical order."""
    return sorted({word.name for word in words if not word.is_toned})


def shifted(images: Tensor) -> Tensor:
    """Shift each picture of (B, 3, S, S) by -4 to 4 pixels in both directions."""
    count, side, device = len(images), images.shape[-1], images.device
    shift = torch.randint(-MARGIN, MARGIN + 1, (2, count, 1), device=device)
    rows, columns = (torch.arange(side, device=device) - shift) % side  # (B, S) each
    batch = torch.arange(count, device=device)[:, None, None]
    return images.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

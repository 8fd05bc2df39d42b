"""The size of a picture that is drawn from another one."""

import math

from fastdiff.checkpoints.model_card import ModelCard


def size_from(size: tuple[int, int], card: ModelCard, most: int) -> tuple[int, int]:
    """Return the (height, width) to draw a picture of `size` at: its own, in multiples that the model can draw.

    most: the pixels of a side. A larger picture is scaled to as many pixels as the model was trained with.
    """
    multiple, factor = card.size_factor, 1.0
    most = most // multiple * multiple
    if max(size) > most:
        pixels = math.prod(card.size) if card.size else most**2
        factor = min(math.sqrt(pixels / math.prod(size)), most / max(size))
    height, width = (max(1, int(factor * side / multiple)) * multiple for side in size)
    return height, width

"""Notice changed values that torch does not count: writes through `.data`, as peft's."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CHUNK = 2**24  # numbers that are summed at once; chosen, not measured
ODD = 0x9E3779B1 - 2**32  # multiplied by a position, gives the factor of a number


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    """Return numbers that change with the bits of the tensors. It waits once for each device.

    A number is a sum of all bits, each element times a factor of its position. A change of one element always changes
    it; other changes go unseen about once in 2^32 times.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for chunk in _chunks(tensors):
        sums.setdefault(chunk.device, []).append(_summed(chunk))
    return [number for each in sums.values() for number in torch.stack(each).tolist()]


def _summed(bits: Tensor) -> Tensor:
    """Return the weighted sum of bits (n,), as an int64."""
    bits = bits.to(torch.int32)
    factors = torch.arange(len(bits), dtype=torch.int32, device=bits.device).mul_(ODD).bitwise_or_(1)
    mixed = (bits >> 13).bitwise_and_(2**19 - 1).bitwise_xor_(bits)  # else a sign would change the highest bit only
    return mixed.mul_(factors).sum(dtype=torch.int64)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Join the bits of tensors of the same dtype and device, so that a GPU runs few kernels."""
    waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    counts: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        bits = _bits(tensor)
        kind = bits.dtype, bits.device
        if kind in waiting and counts[kind] + len(bits) > CHUNK:
            yield torch.cat(waiting.pop(kind))
        waiting.setdefault(kind, []).append(bits)
        counts[kind] = len(bits) + (counts[kind] if len(waiting[kind]) > 1 else 0)
    for each in waiting.values():
        yield torch.cat(each)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers (n,), in the order of its memory if that is channels-last."""
    tensor = tensor.detach()
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    flat = tensor.contiguous().flatten()
    return flat.view({1: torch.int8, 2: torch.int16}.get(flat.element_size(), torch.int32))

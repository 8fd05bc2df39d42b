"""How a convolution's weight lies in memory, so that kernels read it as it is."""

import torch
from torch import Tensor


def k_first(weight: Tensor) -> Tensor:
    """Return the weight (C_out, C_in, kH, kW) in memory as (kH, kW, C_in, C_out): in float32 the kernel's fastest.

    Products of float32 are made from shared memory, where the channels that a warp multiplies by lie side by side then.
    """
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def weight_memory(weight: Tensor) -> tuple[Tensor, bool]:
    """The weight as its memory lies, (C_out, kH, kW, C_in) or, in float32, as `k_first` lays it; and whether so.

    A copy of the first kind, where it lies otherwise.
    """
    filters, turned = weight.permute(0, 2, 3, 1), weight.permute(2, 3, 1, 0)
    if weight.dtype == torch.float32 and turned.is_contiguous() and not filters.is_contiguous():
        return turned, True
    return filters.contiguous(), False

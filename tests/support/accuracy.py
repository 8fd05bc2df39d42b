"""How far from the truth an output of a kernel or a reference may be: the oracle of tests/kernels.

The truth is float64. The peer is made by torch's own functions in the dtype of the output, never by a reference of
ours, and beside it stands a cap, which a peer that is as wrong as the output does not lift.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The largest error of a dtype, in the largest number of the truth. The 16-bit dtypes have two of their eps: an output
# is rounded some four times, by half an eps each. float32 has 80 of its own, for sums of thousands of products.
CAPS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_accurate(actual: Tensor, torchs: Tensor, truth: Tensor, *, lost: float | Tensor = 0.0) -> None:
    """Assert that errors are at most twice torch's own plus one ulp, their RMS likewise, and all below the cap.

    Args:
        actual: what is tested.
        torchs: the same by torch's own functions in the same dtype.
        truth: the same in float64.
        lost: added to the cap, where numbers on the way are much larger than the output and their rounding is lost.
    """
    assert truth.dtype == torch.float64, "the truth is float64"
    assert actual.dtype == torchs.dtype and actual.shape == torchs.shape == truth.shape
    eps = torch.finfo(actual.dtype).eps
    ulp, error, torchs_error = eps * truth.abs(), (actual - truth).abs(), (torchs - truth).abs()
    allowed, cap = torchs_error.max(), CAPS[actual.dtype] * truth.abs().max() + lost
    worst = (error - ulp).max()  # NaN where an element is
    assert worst <= 2 * allowed, f"error {worst:.3g} beyond an ulp, torch's own {allowed:.3g}"
    assert error.max() <= cap, f"error {error.max():.3g} beyond the cap {cap:.3g}"
    rms, rms_torch, rms_ulp = (t.square().mean().sqrt() for t in (error, torchs_error, ulp))
    assert rms <= 1.5 * rms_torch + rms_ulp / 2, f"RMS error {rms:.3g}, torch's own {rms_torch:.3g}"


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with every float tensor cast to the dtype, inside tuples and dicts too."""
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    if isinstance(value, tuple):
        items = (cast(item, dtype) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def in_dtype(dtype: torch.dtype, by_torch: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run what is written by torch's own functions with all its tensors of floats in that dtype."""
    return by_torch(*cast(args, dtype), **cast(options, dtype))


def peer_and_truth(by_torch: Callable[..., Any], dtype: torch.dtype, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Run it in `dtype`, and in float64: the second and third argument of `assert_accurate`."""
    return in_dtype(dtype, by_torch, *args, **options), in_dtype(torch.float64, by_torch, *args, **options)

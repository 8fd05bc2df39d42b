"""The tolerance of tests/kernels for the outputs of kernels and reference implementations.

An output is compared with the truth in float64. Its error may be about as large as the error of torch's own functions
in the same dtype, which are never our reference implementation. A fixed cap also holds, so a wrong output fails even if
torch's output is just as wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The largest error of a dtype, relative to the largest number of the truth. A 16-bit dtype may have twice its eps,
# because an output is rounded about four times, by half an eps each. float32 has 80 eps, for sums of thousands of
# products.
CAPS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_accurate(actual: Tensor, torchs: Tensor, truth: Tensor, *, lost: float | Tensor = 0.0) -> None:
    """Assert that each error is at most twice torch's largest error plus one ulp, and at most the cap.

    The RMS error may be 1.5 times torch's RMS error plus half the RMS of an ulp.

    Args:
        actual: the output to test.
        torchs: the output of torch's own functions in the same dtype.
        truth: the output in float64.
        lost: added to the cap, for outputs whose intermediate numbers are much larger and lose more in rounding.
    """
    assert truth.dtype == torch.float64, "the truth is float64"
    assert actual.dtype == torchs.dtype and actual.shape == torchs.shape == truth.shape
    eps = torch.finfo(actual.dtype).eps
    ulp, error, torchs_error = eps * truth.abs(), (actual - truth).abs(), (torchs - truth).abs()
    allowed, cap = torchs_error.max(), CAPS[actual.dtype] * truth.abs().max() + lost
    worst = (error - ulp).max()  # NaN if any element is
    assert worst <= 2 * allowed, f"error {worst:.3g} beyond an ulp, torch's own {allowed:.3g}"
    assert error.max() <= cap, f"error {error.max():.3g} beyond the cap {cap:.3g}"
    rms, rms_torch, rms_ulp = (t.square().mean().sqrt() for t in (error, torchs_error, ulp))
    assert rms <= 1.5 * rms_torch + rms_ulp / 2, f"RMS error {rms:.3g}, torch's own {rms_torch:.3g}"


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with every float tensor cast to the dtype, also inside tuples and dicts."""
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    if isinstance(value, tuple):
        items = (cast(item, dtype) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class _ByOneDNN(TorchFunctionMode):
    """Compute float32 products and convolutions on a CPU by oneDNN in channels-last, as torch.compile does.

    Eager torch uses MKL for some of them. The number of threads decides for which, and the CPU decides how MKL rounds.
    A tolerance from MKL would depend on both.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.linear, F.conv2d) or args[0].device.type != "cpu" or args[0].dtype != torch.float32:
            return func(*args, **kwargs or {})
        return (_linear if func is F.linear else _conv2d)(*args, **kwargs or {})


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight.contiguous(), bias, "none", [], "")


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    window = [padding] * 2, [stride] * 2, [1, 1], 1
    return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *window, "none", [], "")


def in_dtype(dtype: torch.dtype, by_torch: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run `by_torch` with all its float tensors cast to a dtype."""
    with _ByOneDNN():
        return by_torch(*cast(args, dtype), **cast(options, dtype))


def peer_and_truth(by_torch: Callable[..., Any], dtype: torch.dtype, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Run `by_torch` in `dtype` and in float64. Return both outputs, for `torchs` and `truth` of `assert_accurate`."""
    return in_dtype(dtype, by_torch, *args, **options), in_dtype(torch.float64, by_torch, *args, **options)

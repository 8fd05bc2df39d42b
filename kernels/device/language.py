"""Triton if it is installed (Linux); otherwise a stand-in that lets kernels be defined but not launched.

Kernels import from here: `from fastdiff.kernels.device.language import tl, triton`. `plans.choices` checks whether they
can run.
"""

import importlib.util


class Absent:
    """An object that returns itself for every attribute and call: `@triton.jit`, `tl.constexpr`, `tl.constexpr(1)`."""

    def __getattr__(self, name: str) -> "Absent":
        return self

    def __call__(self, *args, **kwargs) -> "Absent":
        return self


if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
    from triton.language import target_info
    from triton.language.extra import cuda
else:
    triton = tl = target_info = cuda = Absent()

__all__ = ["Absent", "cuda", "target_info", "tl", "triton"]

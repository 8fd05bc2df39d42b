"""Triton where it is installed (Linux); elsewhere a stand-in with which kernels can be defined, but not launched.

Kernels import from here: `from fastdiff.kernels.device.language import tl, triton`. `host.dispatch` knows whether they
can run.
"""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
    from triton.language import target_info
    from triton.language.extra import cuda
else:

    class _Absent:
        """Answers every attribute and every call with itself: `@triton.jit`, `tl.constexpr`, `tl.constexpr(1)`."""

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __call__(self, *args, **kwargs) -> "_Absent":
            return self

    triton = tl = target_info = cuda = _Absent()

__all__ = ["cuda", "target_info", "tl", "triton"]

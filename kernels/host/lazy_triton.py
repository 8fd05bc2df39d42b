"""Triton for host code: the package is imported at its first use, so a CPU's first picture does not wait for it."""

from typing import Any


class LazyTriton:
    """The module `triton`, or its stand-in where Triton is not installed."""

    def __getattr__(self, name: str) -> Any:
        from fastdiff.kernels.device import language

        return getattr(language.triton, name)


triton: Any = LazyTriton()

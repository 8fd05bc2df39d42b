"""Requests that share the steps of the denoising loop."""

from fastdiff.engine.engine import Engine

__all__ = ["Engine"]

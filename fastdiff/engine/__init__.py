"""Requests that share the steps of the denoising loop."""

from fastdiff.engine.engine import Engine
from fastdiff.engine.weights import Weights

__all__ = ["Engine", "Weights"]

"""Requests that share the steps of the denoising loop."""

from fastdiff.diffusion.shared_steps import outside_turn
from fastdiff.engine.counters import Stats
from fastdiff.engine.engine import Engine
from fastdiff.engine.weights import Weights

__all__ = ["Engine", "Stats", "Weights", "outside_turn"]

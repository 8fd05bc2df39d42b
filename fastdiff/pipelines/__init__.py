"""Pipelines: from what is asked for to pictures."""

from fastdiff.pipelines.pipeline import Pipeline

__all__ = ["Pipeline"]

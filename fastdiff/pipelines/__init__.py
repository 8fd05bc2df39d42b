"""Pipelines: from what is asked for to pictures. `Pipeline.from_pretrained` returns the class that draws a folder."""

from fastdiff.pipelines.base import BasePipeline
from fastdiff.pipelines.pipeline import Pipeline
from fastdiff.pipelines.text_to_image import TextToImagePipeline

__all__ = ["BasePipeline", "Pipeline", "TextToImagePipeline"]

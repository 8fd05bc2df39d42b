"""Pipelines: from what is asked for to pictures. `Pipeline.from_pretrained` returns the class that draws a folder."""

from fastdiff.pipelines.base import Pipeline, load_pipeline
from fastdiff.pipelines.label import LabelPipeline
from fastdiff.pipelines.text_to_image import TextToImagePipeline
from fastdiff.pipelines.trajectory import TrajectoryPipeline

__all__ = ["LabelPipeline", "Pipeline", "TextToImagePipeline", "TrajectoryPipeline", "load_pipeline"]

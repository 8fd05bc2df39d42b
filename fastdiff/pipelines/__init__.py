"""Pipelines. `Pipeline.from_pretrained` loads a model folder and returns the pipeline class that matches it."""

from fastdiff.pipelines.base import Pipeline, load_pipeline
from fastdiff.pipelines.label import LabelPipeline
from fastdiff.pipelines.text_to_image import TextToImagePipeline
from fastdiff.pipelines.trajectory import TrajectoryPipeline
from fastdiff.pipelines.z_image import ZImagePipeline

__all__ = [
    "LabelPipeline",
    "Pipeline",
    "TextToImagePipeline",
    "TrajectoryPipeline",
    "ZImagePipeline",
    "load_pipeline",
]

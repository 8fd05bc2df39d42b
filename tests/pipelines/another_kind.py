"""A new kind of pipeline with a model of its own: the least code that a new kind needs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import DenoiserPart, PipelineClass
from fastdiff.diffusion.pictures import Subjects
from fastdiff.diffusion.results import Step
from fastdiff.models.unet2d import UNet2DModel
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.drawing import DrawingOptions
from fastdiff.samplers.shared.scheduler import Scheduler

MIRROR = DenoiserPart("mirror", ("MirrorModel",), UNet2DConfig)
ROW = PipelineClass("MirrorPipeline", {MIRROR: "MirrorPipeline"}, options=("mirrored",))


class MirrorModel(UNet2DModel):
    """A U-Net with another class name and part name."""

    part = MIRROR


class MirrorPipeline(Pipeline):
    """Draws pictures without labels, and mirrors them if model_index.json says so."""

    mirrored = False

    @classmethod
    def _of_card(cls, card: ModelCard, parts: Mapping[str, Any], scheduler: Scheduler) -> "MirrorPipeline":
        pipe = cls(parts["mirror"], scheduler, card.info, card.name, None)
        pipe.mirrored = read_json(Path(card.folder) / "model_index.json")["mirrored"]
        return pipe

    def stream(self, *, num_images: int = 1, **options: Any) -> Iterator[Step]:
        subjects = Subjects("pictures", [None], "num_images", num_images)
        drawing = self._begin(DrawingOptions(**options), subjects)
        return self._run(drawing, drawing.denoise(self.denoiser, self._conditions(drawing)))

    def _begin_decode(self, x: Tensor, output_type: str) -> Any:
        return super()._begin_decode(x.flip(2) if self.mirrored else x, output_type)

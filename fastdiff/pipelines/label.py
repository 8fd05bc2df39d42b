"""LabelPipeline: seeds and labels in, pictures out.

Seeds and labels -> noise, schedule and conditions -> the denoising loop -> pictures.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.pictures import Label, Subjects, read_labels
from fastdiff.diffusion.results import Step
from fastdiff.errors import InputError
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.denoiser import Denoiser
from fastdiff.pipelines.base import Pipeline
from fastdiff.pipelines.drawing import DrawingOptions, refuse
from fastdiff.requests.defaults import LIBRARY
from fastdiff.samplers.shared.scheduler import Scheduler

NOT_HERE = {  # arguments of other pipelines, and why they are refused
    "prompt": "this model has no text encoder; leave it out, or give a Stable Diffusion model",
    "horizon": "this model draws pictures; leave it out",
    "conditions": "this model draws pictures; leave it out",
    "sort_by_value": "this pipeline has no value_function; leave it out",
}


class LabelPipeline(Pipeline):
    """A denoiser, its scheduler and its labels: draws as diffusers' DDPMPipeline, DDIMPipeline and DiTPipeline do.

    Beyond what they do it guides class-conditional models that have a null label. The picture of a seed has the same
    bits alone and at any place of any batch; a `generator` draws as diffusers does.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        scheduler: Any,
        info: ModelInfo | None = None,
        name: str = "model",
        vae: AutoencoderKL | None = None,
    ):
        """`vae`: an AutoencoderKL, for a denoiser of latents. InputError where the models do not fit together."""
        super().__init__(denoiser, scheduler, info, name, vae)
        if denoiser.config.prompt_shapes:
            raise InputError(
                f"denoiser: a {type(denoiser).__name__} draws from prompts; make a TextToImagePipeline of it"
            )
        if denoiser.config.of_trajectories:
            raise InputError(
                f"denoiser: a {type(denoiser).__name__} plans trajectories; make a TrajectoryPipeline of it"
            )

    @classmethod
    def _of_card(cls, card: ModelCard, models: Mapping[str, Any], scheduler: Scheduler) -> "LabelPipeline":
        return cls(models[card.denoiser.name], scheduler, card.info, card.name, models.get("vae"))

    def stream(
        self,
        *,
        class_labels: Label | Sequence[Label] | Tensor = None,
        num_images: int = LIBRARY.pictures,
        **options: Any,
    ) -> Iterator[Step]:
        """Draw pictures and yield a Step after each step; the last one has the finished `images`.

        The pictures are labels x seeds, in that order. With `batch_size` (or a tensor of labels, a list of generators,
        or latents) they are that many, each with a seed and a label of its own.

        Args:
            class_labels: names, indices, None for the null label; or a tensor with a row for each picture. The labels
                of a group take turns: the picture of seed s has the group's label s % len(group).
            num_images: pictures per label; picture i has seed + i. A list of seeds takes its place.
            options: those that every pipeline has, see `Pipeline.stream`.

        Raises as `Pipeline.stream`.
        """
        refuse(options, NOT_HERE)
        subjects = Subjects("class_labels", read_labels(class_labels), "num_images", num_images)
        rows = len(subjects.each) if isinstance(class_labels, Tensor) else None
        drawing = self._begin(DrawingOptions(**options), subjects, class_labels=rows)
        return self._run(drawing, drawing.denoise(self.denoiser, self._conditions(drawing)))

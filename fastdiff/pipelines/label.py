"""LabelPipeline: draws pictures from seeds and class labels.

Seeds and labels -> noise, schedule and conditions -> the denoising loop -> pictures.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from torch import Tensor

from fastdiff.arguments import naming
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.pictures import Label, Subjects, read_labels
from fastdiff.diffusion.results import Step
from fastdiff.errors import InputError
from fastdiff.models.coding import Autoencoder
from fastdiff.models.denoiser import Denoiser
from fastdiff.pipelines.base import Pipeline
from fastdiff.pipelines.drawing import DrawingOptions, accepted, names_of
from fastdiff.requests.defaults import LIBRARY
from fastdiff.samplers.ddim import DDIMScheduler
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import Wanted, checked

_Names = Annotated[str | tuple[str, ...], Wanted("the name of a label, or a list of names")]

REFUSED = {  # arguments of other pipelines, and why they are refused
    "prompt": "this model has no text encoder; leave it out, or give a Stable Diffusion model",
    "image": "only text-to-image pipelines start from a picture; leave it out, or give a Stable Diffusion model",
    "horizon": "this model draws pictures; leave it out",
    "conditions": "this model draws pictures; leave it out",
    "sort_by_value": "this pipeline has no value_function; leave it out",
}


class LabelPipeline(Pipeline):
    """Unconditional and class-conditional pictures, as diffusers' DDPMPipeline, DDIMPipeline and DiTPipeline draw them.

    It also guides any class-conditional model that has a null label. A seed gives the same bits whatever the batch
    size, and wherever in the batch it is. A `generator` gives the noise that diffusers draws with it.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        scheduler: Any,
        info: ModelInfo | None = None,
        name: str = "model",
        vae: Autoencoder | None = None,
    ):
        """Make a pipeline of loaded parts.

        Args:
            denoiser: a model of fastdiff, such as `fastdiff.UNet2DModel`.
            scheduler: a scheduler of fastdiff or of diffusers.
            info: the labels and the defaults of the model, as in its fastdiff.json.
            name: the model's name.
            vae: an AutoencoderKL or AutoencoderTiny of fastdiff, if the denoiser works on latents.

        Raises InputError if the models do not match.
        """
        super().__init__(denoiser, scheduler, info, name, vae)
        if denoiser.config.prompt_shapes:
            raise InputError(f"denoiser: a {type(denoiser).__name__} takes prompts; use it in a TextToImagePipeline")
        if denoiser.config.of_trajectories:
            raise InputError(
                f"denoiser: a {type(denoiser).__name__} plans trajectories; use it in a TrajectoryPipeline"
            )

    @classmethod
    def _of_card(cls, card: ModelCard, parts: Mapping[str, Any], scheduler: Scheduler) -> "LabelPipeline":
        return cls(parts[card.denoiser.name], scheduler, card.info, card.name, parts.get("vae"))

    def _usual_class(self) -> str:
        if self.denoiser.part.name == "transformer":
            return "DiTPipeline"
        return "DDIMPipeline" if isinstance(self.scheduler, DDIMScheduler) else "DDPMPipeline"

    @property
    def labels(self) -> dict[str, int]:
        """The index of each label by its name, as in diffusers' DiTPipeline."""
        return {name: index for index, name in enumerate(self.info.labels) if name is not None}

    def get_label_ids(self, label: str | Sequence[str]) -> list[int]:
        """Return the indices of labels by their names, as diffusers' DiTPipeline. Raises InputError for other names."""
        names = checked("label", label, _Names)
        with naming("label"):
            return [self.info.label_index(name) for name in ([names] if isinstance(names, str) else names)]

    def stream(
        self,
        *,
        class_labels: Label | Sequence[Label] | Tensor = None,
        num_images: int = LIBRARY.pictures,
        **options: Any,
    ) -> Iterator[Step]:
        """Draw pictures and yield a `Step` after each step. The last step has the finished `images`.

        By default each label is drawn with each seed: `class_labels=[3, 7], num_images=2` draws label 3 with seeds 0
        and 1, then label 7 with seeds 0 and 1. `batch_size`, a tensor of labels, a list of generators or latents set
        the number of pictures instead, and then each picture has its own seed: with `batch_size=4` the same call draws
        label 3 with seeds 0 and 1, then label 7 with seeds 2 and 3. Then there may be one label, one for each picture,
        or one for each `num_images` pictures.

        Args:
            class_labels: a label or a list of labels: a name, an index, or None for the null label; or a tensor with
                one row for each picture. The name of a group stands for all its labels in turn: seed s draws label
                `s % len(group)` of the group.
            num_images: pictures for each label. Picture i has seed `seed + i`. A list of seeds replaces it.
            options: the arguments of `Pipeline.stream`.

        Raises as `Pipeline.stream`.
        """
        asked = accepted(options, names_of(DrawingOptions) - {"horizon"}, REFUSED, "pipelines of labels")
        subjects = Subjects("class_labels", read_labels(class_labels), "num_images", num_images)
        rows = len(subjects.each) if isinstance(class_labels, Tensor) else None
        drawing = self._begin(DrawingOptions(**asked), subjects, class_labels=rows)
        return self._run(drawing, drawing.denoise(self.denoiser, self._conditions(drawing)))

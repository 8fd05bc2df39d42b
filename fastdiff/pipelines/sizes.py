"""The size conditioning of SDXL, section 2.2 of Podell et al. 2023 (arXiv 2307.01952)."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from fastdiff.errors import InputError
from fastdiff.schema import Wanted, checked

_Number = Annotated[int, Interval(ge=0, le=2**16)]
_Pair = Annotated[tuple[_Number, _Number], Wanted("two whole numbers from 0 to 65536, the vertical first")]

Pair = tuple[int, int] | None
SCORES = {"aesthetic_score": 6.0, "negative_aesthetic_score": 2.5}  # and their defaults in diffusers


@dataclass(frozen=True)
class SizeOptions:
    """The size arguments of SDXL, (height, width) and (top, left), as in diffusers' StableDiffusionXLPipeline."""

    original_size: Pair = None  # default: the height and width of the call, else the model's own
    crops_coords_top_left: Pair = None  # default: (0, 0)
    target_size: Pair = None  # default: as original_size
    negative_original_size: Pair = None  # the negative values are used only if both negative sizes are given
    negative_crops_coords_top_left: Pair = None
    negative_target_size: Pair = None
    aesthetic_score: float | None = None  # of SDXL's refiner; default: 6, and 2.5 for the negative
    negative_aesthetic_score: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind: Any = float | None if name in SCORES else _Pair | None
            object.__setattr__(self, name, checked(name, value, kind))

    def check_unused(self) -> None:
        """Raise InputError if any size is set, for a model that takes none."""
        given = [name for name, value in vars(self).items() if value is not None]
        if given:
            raise InputError(f"{given[0]}: only SDXL takes it; leave it out")

    def check_no_scores(self) -> None:
        """Raise InputError if a score is set, for a model that takes none."""
        given = [name for name in SCORES if getattr(self, name) is not None]
        if given:
            raise InputError(f"{given[0]}: only SDXL's refiner takes it; leave it out")

    def time_ids(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the six size numbers, (6,) float32, of the conditional and of the unconditional half."""
        size = height, width
        ids = _ids(self.original_size or size, self.crops_coords_top_left, self.target_size or size)
        if self.negative_original_size is None or self.negative_target_size is None:
            return ids, ids
        away = self.negative_original_size, self.negative_crops_coords_top_left, self.negative_target_size
        return ids, _ids(*away)

    def time_ids_of_picture(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the same for a run that starts from a picture of this size, as diffusers' image pipelines set them.

        The negative sizes default to the other sizes, and the negative crop is not used.
        """
        original, target = self.original_size or (height, width), self.target_size or (height, width)
        crop = self.crops_coords_top_left
        away = self.negative_original_size or original, crop, self.negative_target_size or target
        return _ids(original, crop, target), _ids(*away)

    def time_ids_of_refiner(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the five numbers of SDXL's refiner, (5,) float32, of both halves: a score stands for the target."""
        asked = {name: getattr(self, name) for name in SCORES}
        score, negative = (SCORES[name] if value is None else value for name, value in asked.items())
        original = self.original_size or (height, width)
        away = self.negative_original_size or original, self.negative_crops_coords_top_left, (negative,)
        return _ids(original, self.crops_coords_top_left, (score,)), _ids(*away)


def _ids(original: Any, crop: Any, target: Any) -> Tensor:
    return torch.tensor([*original, *(crop or (0, 0)), *target], dtype=torch.float32)

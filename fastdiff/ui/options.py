"""Options of the form or of an API call, and the checked run that they ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdiff.errors import InputError
from fastdiff.numbers import MAX_SEED, is_int
from fastdiff.requests import defaults
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models

MAX_NAME = 200  # characters


@dataclass(frozen=True)
class Options:
    """The settings asked for, unchecked; None leaves a choice to the model. The names are those of the API too."""

    model: Any = defaults.MODEL
    label: Any = None
    seed: Any = defaults.SEED
    num_images: Any = defaults.PAGE.pictures
    steps: Any = None
    scheduler: Any = None
    eta: Any = None
    guidance_scale: Any = None
    width: Any = None
    height: Any = None
    batch_size: Any = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Options":
        """The options of one picture, out of the settings that it records."""
        same = ("model", "label", "seed", "scheduler", "eta", "guidance_scale", "width", "height")
        return cls(steps=record["num_inference_steps"], **{name: record.get(name) for name in same})


def prepare(options: Options, models: Models, limits: Limits) -> Run:
    """The run that `options` ask for. InputError naming the field and the remedy, before anything heavy is done."""
    _check_limits(options, limits)
    card = models.card(options.model)
    request = Request(
        model=card.name,
        label=() if options.label is None else (options.label,),
        seed=options.seed,
        num_images=options.num_images,
        num_inference_steps=options.steps,
        scheduler=options.scheduler,
        eta=options.eta,
        guidance_scale=options.guidance_scale,
    )
    width, height = card.size or (None, None)
    height, width = options.height or height, options.width or width
    run = Run.prepare(request, card, models.defaults, batch_size=options.batch_size, height=height, width=width)
    if height is None or width is None:
        raise InputError(f"width, height: {card.name} was trained at no size of its own; give both")
    card.config.check_size(height, width, scale=card.scale)
    return run


def _check_limits(options: Options, limits: Limits) -> None:
    ranges = {
        "seed": (0, MAX_SEED),
        "num_images": (1, limits.pictures),
        "steps": (1, limits.steps),
        "width": (1, limits.side),
        "height": (1, limits.side),
        "batch_size": (1, limits.batch_size),
    }
    for name in ("model", "label"):
        value = getattr(options, name)
        if isinstance(value, str) and len(value) > MAX_NAME:
            raise InputError(f"{name} {value[:40]}...: give a name of up to {MAX_NAME} characters")
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        optional = Options.__dataclass_fields__[name].default is None
        if not (optional and value is None) and not is_int(value, least, most):
            raise InputError(f"{name} {str(value)[:40]}: give a whole number from {least} to {most}")

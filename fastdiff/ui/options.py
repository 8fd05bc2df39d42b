"""Options of the form or of an API call, and the checked run that they ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from annotated_types import Len

from fastdiff.errors import InputError
from fastdiff.kinds import Label, Prompt, Seed
from fastdiff.requests import defaults
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run
from fastdiff.schema import Wanted, checked, whole
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models

Name = Annotated[str, Len(0, 200), Wanted("a name of up to 200 characters")]


@dataclass(frozen=True)
class Options:
    """The settings asked for, unchecked; None leaves a choice to the model. The names are those of the API too."""

    model: Any = None  # None: the first of those that draw labels, or prompts
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
    prompt: Any = None
    negative_prompt: Any = None
    clip_skip: Any = None
    precision: Any = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Options":
        """The options of one picture, out of the settings that it records."""
        other = ("num_images", "steps", "batch_size")
        same = [option.name for option in fields(cls) if option.name not in other]
        values = {name: record.get(name) for name in same}
        values["negative_prompt"] = values["negative_prompt"] or None  # as the form has an empty one
        return cls(steps=record["num_inference_steps"], **values)


def prepare(options: Options, models: Models, limits: Limits) -> Run:
    """The run that `options` ask for. InputError naming the field and the remedy, before anything heavy is done."""
    _check_limits(options, limits)
    first = defaults.model_of(labelled=options.label is not None)
    card = models.card(first if options.model is None else options.model)
    if card.reads_text and options.prompt is None:
        raise InputError(f"prompt: {card.name} draws from a text; give one, which may be empty")
    request = Request(
        model=card.name,
        label=() if options.label is None else (options.label,),
        prompt=() if options.prompt is None else (options.prompt,),
        negative_prompt=options.negative_prompt,
        clip_skip=options.clip_skip,
        precision=options.precision or defaults.PRECISION,
        seed=options.seed,
        num_images=options.num_images,
        num_inference_steps=options.steps,
        scheduler=options.scheduler,
        eta=options.eta,
        guidance_scale=options.guidance_scale,
        height=options.height,
        width=options.width,
    )
    run = Run.prepare(request, card, models.defaults, batch_size=options.batch_size)
    models.budget.check(run)
    return run


def _check_limits(options: Options, limits: Limits) -> None:
    steps, side, batch_size = (whole(1, most) | None for most in (limits.steps, limits.side, limits.batch_size))
    kinds = {
        "model": Name | None,
        "label": Label | Name | None,
        "seed": Seed,
        "num_images": whole(1, limits.pictures),
        "steps": steps,
        "width": side,
        "height": side,
        "batch_size": batch_size,
        "prompt": Prompt | None,
        "negative_prompt": Prompt | None,
    }
    for name, kind in kinds.items():
        checked(name, getattr(options, name), kind)

"""Complete a request for a model: choose what it leaves open, check it, and list its pictures."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdiff.arguments import shown
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_SEED, MAX_SIDE
from fastdiff.requests.defaults import (
    UPSCALE_MODE,
    UPSCALE_STRENGTH,
    Defaults,
    ModelFacts,
    Sampling,
    SamplingOptions,
    complete_sampling,
    control_scale_of,
    strength_of,
    taken_steps,
)
from fastdiff.requests.input_picture import (
    MASK,
    Control,
    ImagePrompt,
    InputPicture,
    Mask,
    Start,
    control_settings,
    ip_adapter_settings,
    read_listed,
)
from fastdiff.requests.request import TEXT_SETTINGS, UPSCALE_SETTINGS, Request, check_settings
from fastdiff.requests.syntax import EMPHASIS, SYNTAX
from fastdiff.sampler_names import ETAS

WHOLE = "upscale: it enlarges whole pictures, not with a mask; enlarge the result in a second run"


@dataclass(frozen=True)
class Cell:
    """One picture to draw: a cell of the table of labels x seeds, or prompts x seeds."""

    seed: int
    label: int | None  # index; None without labels
    label_name: str | int | None  # the index if the label has no name
    prompt: str | None = None  # None for a model without text
    start: Start | None = None  # None: from noise alone
    control: Control | None = None  # None: without ControlNets
    image_prompt: ImagePrompt | None = None  # None: without IP-Adapters

    @property
    def given(self) -> tuple[Start | Control | ImagePrompt, ...]:
        """The start, the control and the image prompt, without one that is None."""
        return tuple(each for each in (self.start, self.control, self.image_prompt) if each is not None)

    def as_identity(self) -> dict[str, Any]:
        """Return the settings of these pictures in a PNG that the drawn picture depends on."""
        return {name: value for each in self.given for name, value in each.as_identity().items()}


def complete(
    request: Request, card: ModelCard, defaults: Defaults, *, masked: bool | None = None
) -> tuple[Request, list[Cell]]:
    """Return `request` with its open choices made for `card` and its seeds listed, and the pictures it asks for.

    The pictures are labels x seeds or prompts x seeds, in that order. The labels of a group alternate from seed to
    seed. Raises InputError for anything that the model cannot do.

    masked: whether pictures have masks, if what they start from is not known yet.
    """
    prompts = _prompts(request, card, defaults)
    check_settings(request, card)
    labels = _labels(request, card, defaults)
    asked = SamplingOptions(
        scheduler=request.scheduler,
        num_inference_steps=request.num_inference_steps,
        eta=request.eta,
        use_clipped_model_output=request.use_clipped_model_output,
        guidance_scale=request.guidance_scale,
    )
    has_mask = request.mask is not None if masked is None else masked
    sampling = complete_sampling(asked, ModelFacts.of(card), defaults, labelled=bool(labels), masked=has_mask)
    _check_sampling(sampling, card, labelled=bool(labels))
    _check_interval(request)
    start = _start(request, sampling.num_inference_steps, card) if masked is None else None
    control, images = read_listed(request) if masked is None else (None, None)
    height, width = _size(_sized(request, start, control, card), card)
    seeds = _seeds(request, labels, prompts, defaults)
    completed = replace(
        request,
        **vars(sampling),
        revision=card.revision or request.revision,
        height=height,
        width=width,
        horizon=_horizon(request, card),
        clip_skip=request.clip_skip or None,
        guidance_start=request.guidance_start or None,
        guidance_stop=None if request.guidance_stop == 1 else request.guidance_stop,
        strength=None if start is None else start.strength,
        mask_blur=request.mask_blur or None,
        **_upscaling(request, sampling.num_inference_steps, (height, width), card),
        **control_settings(request, _default_scale(card, start) if masked is None else None),
        **ip_adapter_settings(request),
        prompt_syntax=None if request.prompt_syntax == SYNTAX else request.prompt_syntax,
        emphasis=None if request.emphasis == EMPHASIS else request.emphasis,
        label=tuple(card.choices_name(choices) for choices in labels),
        prompt=prompts,
        seed=seeds,
        num_images=None,
    )
    if not labels:
        given = start, control, images
        return completed, [Cell(seed, None, None, prompt, *given) for prompt in prompts or (None,) for seed in seeds]
    return completed, [cell for choices in labels for cell in label_cells(card, choices, seeds)]


def label_cells(card: ModelCard, choices: Sequence[int], seeds: Iterable[int]) -> list[Cell]:
    """Return the pictures of one label, or of a group, whose labels alternate from seed to seed."""
    turns = [(seed, choices[seed % len(choices)]) for seed in seeds]
    return [Cell(seed, label, card.label_name(label)) for seed, label in turns]


def seeds_from(first: int, count: int) -> range:
    """Return `count` consecutive seeds. InputError if they would exceed MAX_SEED."""
    if first + count - 1 > MAX_SEED:
        raise InputError(f"seed {first}: {count} pictures would exceed the last seed {MAX_SEED}; use a smaller seed")
    return range(first, first + count)


def random_seed(count: int) -> int:
    """Return a random first seed for `count` consecutive seeds."""
    return secrets.randbelow(MAX_SEED + 2 - count)


def _start(request: Request, steps: int, card: ModelCard) -> Start | None:
    """Read the picture and the mask of a request."""
    picture, mask = read_picture(request), read_mask(request)
    return begin(picture, request.strength, steps, card, mask, controlled=bool(request.control))


def read_picture(request: Request) -> InputPicture | None:
    """Read the picture that a request starts from. Raises InputError."""
    name, inside = request.init_image, request.init_image_inside
    return None if name is None else InputPicture.read(name, inside=inside)


def read_mask(request: Request) -> Mask | None:
    """Read the mask of a request. Raises InputError, also for settings of a mask without one."""
    if request.mask is not None:
        return mask_of(InputPicture.read(request.mask, MASK, inside=request.mask_inside), request)
    for name, value in (("mask-blur", request.mask_blur), ("mask-crop", request.mask_crop)):
        if value is not None and (name != "mask-blur" or value):
            raise InputError(f"{name} {value:g}: it is an option of a mask; give --mask, or leave it out")
    return None


def mask_of(picture: InputPicture, request: Request) -> Mask:
    """Return a mask with the settings of a request."""
    return Mask(picture, request.mask_blur or 0.0, request.mask_crop)


def begin(
    picture: InputPicture | None,
    strength: float | None,
    steps: int,
    card: ModelCard,
    mask: Mask | None = None,
    *,
    controlled: bool = False,
) -> Start | None:
    """Return what a run of `steps` starts from, by default with the strength of diffusers' pipelines.

    Raises InputError for a strength or a mask without a picture, for a strength that leaves no step, and for an
    inpainting model without a mask.
    """
    if mask is not None and picture is None:
        raise InputError(f"mask {shown(mask.picture.name)}: it says where to change a picture; give --init-image")
    if mask is None and card.config.inpaints:
        given = "--init-image and --mask" if picture is None else "--mask"
        raise InputError(f"mask: {card.name} is for inpainting; give {given}, a picture that is white where it paints")
    if picture is None:
        if strength is not None:
            raise InputError(f"strength {strength:g}: it says how much of a picture to change; give --init-image")
        return None
    if mask is not None and mask.crop is not None:
        _check_crop(mask.picture, picture)
    if strength is None:
        strength = default_strength(card, masked=mask is not None, controlled=controlled)
    if taken_steps(steps, strength, of_captions=card.reads_captions) < 1:
        raise InputError(f"strength {strength:g}: it leaves none of {steps} steps; raise it, or take more steps")
    return Start(picture, strength, mask)


def _check_crop(mask: InputPicture, picture: InputPicture) -> None:
    """Raise InputError unless a part of a picture can be drawn and put back."""
    if mask.size != picture.size:
        sizes = ["{} x {}".format(*each.size) for each in (mask, picture)]
        raise InputError(f"mask-crop: the mask is {sizes[0]}, and the picture is {sizes[1]}; give both the same size")
    if not mask.brightest():
        raise InputError(f"mask-crop: {shown(mask.name)} is black, so it shows no part; paint white what shall change")


def _sized(request: Request, start: Start | None, control: Control | None, card: ModelCard) -> Request:
    """Return the request with its size, if a picture gives it. With a mask it may be the model, as in diffusers."""
    if start is not None:
        is_models = start.mask is not None and not card.reads_captions
        return request if is_models else sized_as(start.picture, request, card)
    return request if control is None else sized_as(control.pictures[0], request, card)


def default_strength(card: ModelCard, *, masked: bool, controlled: bool = False) -> float:
    """Return the strength of diffusers' image-to-image pipeline of a model.

    masked: of its inpainting pipeline; controlled: of its pipeline with ControlNets.
    """
    of_sdxl, of_captions = _is_of_sdxl(card), card.reads_captions
    return strength_of(of_sdxl=of_sdxl, masked=masked, controlled=controlled, of_captions=of_captions)


def _is_of_sdxl(card: ModelCard) -> bool:
    return getattr(card.config, "addition_embed_type", None) == "text_time"


def sized_as(picture: InputPicture, request: Request, card: ModelCard) -> Request:
    """Return the request with the sides of a picture where it has none, rounded down to a multiple for the model."""
    factor = card.size_factor
    sides = [side - side % factor for side in picture.size]
    height, width = request.height or sides[0], request.width or sides[1]
    if 0 in (height, width):
        own = f"{picture.size[0]} x {picture.size[1]}"
        raise InputError(
            f"{picture.setting} {shown(picture.name)}: {own} is too small; give --height and --width, multiples of "
            f"{factor}"
        )
    return replace(request, height=height, width=width)


def enlarged(size: tuple[int, int], upscale: float, multiple: int) -> tuple[int, int]:
    """Return the height and width of an enlarged picture, in multiples that the model can draw."""
    height, width = (max(1, round(side * upscale / multiple)) * multiple for side in size)
    return height, width


def _upscaling(request: Request, steps: int, size: tuple[int | None, int | None], card: ModelCard) -> dict[str, Any]:
    """Return the settings of an enlarged picture with every choice made. An `upscale` of 1 is none."""
    asked = {name: getattr(request, name) for name in UPSCALE_SETTINGS}
    if request.upscale is None:
        name = next((name for name, value in asked.items() if value is not None), None)
        if name is not None:
            shown_as = Request.SHOWN_AS[name]
            raise InputError(f"{shown_as} {asked[name]}: it says how to enlarge; give --upscale, or leave it out")
    height, width = size
    if request.upscale in (None, 1) or height is None or width is None:
        return dict.fromkeys(UPSCALE_SETTINGS)
    if request.mask is not None or card.config.inpaints:
        raise InputError(WHOLE)
    strength = UPSCALE_STRENGTH if request.upscale_strength is None else request.upscale_strength
    if int(steps * strength) < 1:
        raise InputError(
            f"upscale-strength {strength:g}: it leaves none of {steps} steps; raise it, or take more steps"
        )
    sides = enlarged((height, width), request.upscale, card.size_factor)
    if max(sides) > MAX_SIDE:
        large = "{} x {}".format(*sides)
        raise InputError(f"upscale {request.upscale:g}: it makes a picture of {large}; a side has at most {MAX_SIDE}")
    mode = request.upscale_mode or UPSCALE_MODE
    return {"upscale": request.upscale, "upscale_strength": strength, "upscale_mode": mode}


def _default_scale(card: ModelCard, start: Start | None) -> float:
    masked = start is not None and start.mask is not None
    return control_scale_of(of_sdxl=_is_of_sdxl(card), from_image=start is not None, masked=masked)


def _check_sampling(sampling: Sampling, card: ModelCard, labelled: bool) -> None:
    for name, owners in {"eta": tuple(ETAS), "use_clipped_model_output": ("ddim",)}.items():
        value = getattr(sampling, name)
        if sampling.scheduler not in (*owners, None) and value is not None:
            whose = " and ".join(owners)
            raise InputError(f"{name} {value} is an option of {whose}; leave it out, or give --scheduler {owners[0]}")
    check_steps(sampling.num_inference_steps, card)
    guidable = card.reads_text or (labelled and card.info.null_label is not None)
    if sampling.guidance_scale != 1 and not guidable:
        raise InputError(
            f"cfg-scale {sampling.guidance_scale}: {card.name} has no null label, which guidance needs; leave it out"
        )


def _check_interval(request: Request) -> None:
    start, stop = request.guidance_start or 0.0, request.guidance_stop
    if stop is not None and stop < start:
        raise InputError(f"guidance-stop {stop}: it is before --guidance-start {start}; give a larger number")


def check_steps(steps: int, card: ModelCard) -> None:
    """Raise InputError for more steps than the model was trained with."""
    most = card.num_train_timesteps
    if steps > most:
        raise InputError(f"steps {steps}: {card.name} was trained with {most} steps; use 1 to {most}")


def _prompts(request: Request, card: ModelCard, defaults: Defaults) -> tuple[str, ...]:
    """Return the prompts of the request, or the model's examples.

    Raises InputError for settings that the model cannot read, and for a text model without any prompt.
    """
    if not card.reads_text:
        asked = {"prompt": request.prompt} | {name: getattr(request, name) for name in TEXT_SETTINGS}
        name = next((name for name, value in asked.items() if value not in (None, ()) and value is not False), None)
        if name is not None:
            labels = ", or give a --label" if card.config.num_class_embeds else ""
            raise InputError(f"{name.replace('_', '-')}: {card.name} has no text encoder; leave it out{labels}")
        return ()
    if request.label:
        raise InputError(
            f"label {shown(request.label[0])}: {card.name} draws from prompts; leave it out, or give another --model"
        )
    if not card.tokenizers:
        raise InputError(f"prompt: {card.name} has no text encoder; pass prompt_embeds in Python instead")
    prompts = request.prompt or card.info.prompts[: defaults.prompts]
    if not prompts:
        raise InputError(f"prompt: {card.name} draws from text; give --prompt or --prompt-file")
    if (request.clip_skip or 0) > card.most_clip_skip:
        raise InputError(
            f"clip-skip {request.clip_skip}: the text encoder of {card.name} can skip at most "
            f"{card.most_clip_skip} layers; use a smaller number"
        )
    return prompts


def _size(request: Request, card: ModelCard) -> tuple[int | None, int | None]:
    """Return the height and width of the pictures, or (None, None) for trajectories."""
    height, width = request.height, request.width
    if card.config.of_trajectories:
        if (height, width) != (None, None):
            raise InputError(f"height, width: {card.name} plans trajectories, which have none; leave them out")
        return None, None
    size = card.config.complete_size(height, width, card.scale)
    if size is None:
        raise InputError(f"width, height: {card.name} has no default size; give both")
    return size


def _horizon(request: Request, card: ModelCard) -> int | None:
    """Return the positions of a trajectory, or None for a model that draws pictures."""
    if not card.config.of_trajectories:
        if request.horizon is not None:
            raise InputError(f"horizon {request.horizon}: {card.name} draws pictures, which have none; leave it out")
        return None
    size = card.config.complete_size(1, request.horizon)
    if size is None:
        raise InputError(f"horizon: {card.name} has no default; give --horizon, the positions of a trajectory")
    return size[1]


def _labels(request: Request, card: ModelCard, defaults: Defaults) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each label of the request, or of the default labels."""
    if request.label and not card.config.num_class_embeds:
        raise InputError(f"label {shown(request.label[0])}: {card.name} has no labels; leave it out")
    if card.reads_text:
        return ()
    asked = request.label or _spread_labels(card, defaults.labels)
    labels = tuple(card.info.label_choices(label, card.config.num_class_embeds) for label in asked)
    if len(set(labels)) < len(labels):
        raise InputError("a label is given twice; use --num-images for more pictures of a label")
    return labels


def _spread_labels(card: ModelCard, most: int) -> Sequence[str | int]:
    """Return up to `most` groups, or labels if there are no groups, evenly spaced from the first to the last."""
    every: Sequence[str | int] = list(card.info.label_groups) or card.labels
    count = min(most, len(every))
    return [every[i * (len(every) - 1) // max(1, count - 1)] for i in range(count)]


def _seeds(request: Request, labels: Sequence[Any], prompts: Sequence[str], defaults: Defaults) -> tuple[int, ...]:
    """Return the seeds for each label or prompt."""
    seed, count, num_subjects = request.seed, request.num_images, max(1, len(labels or prompts))
    if isinstance(seed, tuple):
        if count not in (None, len(seed)):
            raise InputError(f"num-images {count}: the list has {len(seed)} seeds; leave one of the two out")
        seeds = seed
    else:
        count = count or (1 if request.prompt else max(1, defaults.pictures // num_subjects))
        first = random_seed(count) if isinstance(seed, str) else seed
        seeds = tuple(seeds_from(first, count))
    most = defaults.most_pictures
    if num_subjects * len(seeds) > most:
        what = "prompts" if prompts else "labels"
        raise InputError(f"{num_subjects} {what} x {len(seeds)} seeds are too many; the limit is {most} pictures")
    return seeds

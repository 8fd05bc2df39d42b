"""An unchecked request from the form or the API, and the limits of a request."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args

from annotated_types import Interval, Len

from fastdiff.hosting.catalogue.offered import MAX_LORAS
from fastdiff.kinds import MAX_SEED, Fraction, Label, Prompt, Seed
from fastdiff.requests import defaults
from fastdiff.requests.completion import random_seed
from fastdiff.requests.request import Request
from fastdiff.schema import Wanted, checked, option_kind, wanted, whole

Name = Annotated[str, Len(0, 200), Wanted("a name of up to 200 characters")]
Loras = Annotated[
    tuple[Name, ...], Len(0, MAX_LORAS), Wanted(f"a list of up to {MAX_LORAS} names, each NAME or NAME:WEIGHT")
]
Picture = Annotated[Any, Wanted("an uploaded picture")]  # `uploaded_path` checks it
Preprocessor = Literal["none", "canny"]
PREPROCESSOR, CANNY = get_args(Preprocessor)
_Threshold = whole(0, 2040)  # of the gradient in fastdiff.edges
_Scale = Annotated[float, Interval(ge=-100, le=100)]
MAX_SUBJECT = 60  # characters of a prompt in the list of runs
RANDOM = -1  # the seed of the form when it opens, as in A1111; None and an empty field mean the same
_SeedOrRandom = Annotated[
    Seed | Literal[-1] | None, Wanted(f"a whole number from 0 to {MAX_SEED}, or {RANDOM} for a random seed")
]


@dataclass(frozen=True)
class UncheckedRequest:
    """The requested settings, of any type; None uses the model's default. The API has the same names."""

    model: Any = None  # None: the default model for labels or for prompts
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
    lora: Any = None  # each NAME or NAME:WEIGHT
    init_image: Any = None  # an upload: Gradio's FileData, or its path on the server
    strength: Any = None
    prompt_syntax: Any = None
    emphasis: Any = None
    guidance_start: Any = None
    guidance_stop: Any = None
    mask: Any = None  # an upload, as `init_image`
    mask_blur: Any = None
    upscale: Any = None
    upscale_strength: Any = None
    upscale_mode: Any = None
    control: Any = None  # the name of a ControlNet
    control_image: Any = None  # an upload, as `init_image`
    control_preprocessor: Any = None  # what makes the control picture from it
    canny_low: Any = None
    canny_high: Any = None
    control_scale: Any = None
    control_start: Any = None
    control_end: Any = None
    guess_mode: Any = None
    ip_adapter: Any = None  # the name of an IP-Adapter
    ip_adapter_image: Any = None  # an upload, as `init_image`
    ip_adapter_scale: Any = None

    @property
    def subject(self) -> str:
        """The prompt, label or model of a checked request, in short."""
        return textwrap.shorten(str(self.prompt or self.label or self.model), MAX_SUBJECT, placeholder="…")

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "UncheckedRequest":
        """Return the request for one picture from its recorded settings."""
        other = ("num_images", "steps", "batch_size")
        same = [field.name for field in fields(cls) if field.name not in other]
        values = {name: record.get(name) for name in same}
        values["negative_prompt"] = values["negative_prompt"] or None  # the form has an empty string for none
        return cls(steps=record["num_inference_steps"], **values)


@dataclass(frozen=True)
class Limits:
    """The limits of one request, and of the files that the server keeps."""

    pictures: int = 32  # of one request
    steps: int = 1000
    side: int = 1024  # width and height, pixels
    enlarged: int = 2048  # width and height of enlarged pictures
    batch_size: int = 32
    waiting: int = 32  # runs in the queue
    waiting_of_one: int = 16  # runs of one user in the queue
    upload: int = 64 * 2**20  # bytes of one request's body; a sheet of pictures can be as large
    kept: int = 2**30  # bytes of pictures per user or browser, or of all API clients, on a shared server
    visitors: int = 8 * 2**30  # bytes of pictures of all browsers together: a browser can drop its cookie
    uploads: int = 256 * 2**20  # bytes of all uploads on disk

    def check(self, request: UncheckedRequest) -> UncheckedRequest:
        """Return the request, with a seed for a random one, so that all its pictures have the same.

        Raises InputError, with the name of the field, for a value of the wrong type or beyond its limit.
        """
        for name, kind in self._kinds.items():
            checked(name, getattr(request, name), kind)
        is_random = request.seed in (RANDOM, None)
        return replace(request, seed=random_seed(request.num_images)) if is_random else request

    def wanted(self, name: str) -> str:
        """Return the words for what a field of a request accepts, such as "a whole number from 1 to 32"."""
        return wanted(self._kinds[name] if name in self._kinds else option_kind(Request, name))

    @property
    def _kinds(self) -> dict[str, Any]:
        """The kinds of the fields that have limits here. `Request` checks the others."""
        steps, side, batch_size = (whole(1, most) | None for most in (self.steps, self.side, self.batch_size))
        return {
            "model": Name | None,
            "label": Label | Name | None,
            "seed": _SeedOrRandom,
            "num_images": whole(1, self.pictures),
            "steps": steps,
            "width": side,
            "height": side,
            "batch_size": batch_size,
            "prompt": Prompt | None,
            "negative_prompt": Prompt | None,
            "lora": Loras | None,
            "init_image": Picture | None,
            "mask": Picture | None,
            "control": Name | None,
            "control_image": Picture | None,
            "control_preprocessor": Preprocessor | None,
            "canny_low": _Threshold | None,
            "canny_high": _Threshold | None,
            "control_scale": _Scale | None,
            "control_start": Fraction | None,
            "control_end": Fraction | None,
            "guess_mode": bool | None,
            "ip_adapter": Name | None,
            "ip_adapter_image": Picture | None,
            "ip_adapter_scale": _Scale | None,
        }

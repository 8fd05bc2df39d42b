"""A request for pictures, from flags or from the settings in a PNG, checked by one set of rules.

Imports nothing heavy, so all checks here run before torch is imported.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Interval, Len, Predicate

from fastdiff.arguments import shown
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.names import Revision, Variant
from fastdiff.errors import InputError
from fastdiff.kinds import (
    MAX_LAYERS,
    MAX_PICTURES,
    MAX_PROMPT,
    MAX_SEED,
    MAX_UPSCALE,
    Fraction,
    Horizon,
    Label,
    Margin,
    NotNegative,
    Pictures,
    Pixels,
    Precision,
    PredictionType,
    Prompt,
    Radius,
    Seed,
    Steps,
    UpscaleMode,
)
from fastdiff.requests import defaults
from fastdiff.requests.png import Recorded
from fastdiff.requests.prompt_file import read_prompts
from fastdiff.requests.styles import Styles
from fastdiff.requests.syntax import SYNTAX, Emphasis, PromptSyntax
from fastdiff.sampler_names import SchedulerName
from fastdiff.schema import Schema, Wanted, wanted

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(DtypeName)
PRECISIONS: tuple[str, ...] = get_args(Precision)

_NO_CONTROL: dict[str, Any] = dict.fromkeys(
    ("control", "control_image", "control_scale", "control_start", "control_end"), ()
) | {"guess_mode": None}
_NO_IP_ADAPTER: dict[str, Any] = dict.fromkeys(("ip_adapter", "ip_adapter_image", "ip_adapter_scale"), ()) | {
    "image_encoder": None
}
# With --from, a flag that replaces a recorded setting also drops the recorded settings that depend on it.
_DEPENDENTS: dict[str, dict[str, Any]] = {
    "model": dict.fromkeys(
        ("revision", "variant", "config", "vae", "prediction_type", "horizon", "height", "width"), None
    )
    | {"embedding": (), "lora": ()}
    | _NO_CONTROL
    | _NO_IP_ADAPTER,
    "ip_adapter": {"image_encoder": None},
    "init_image": {"height": None, "width": None},
    "control_image": {"height": None, "width": None},
    "scheduler": {"eta": None, "use_clipped_model_output": None},
    "label": {"prompt": (), "negative_prompt": None, "clip_skip": None, "embedding": (), "lora": ()}
    | dict.fromkeys(("guidance_start", "guidance_stop", "prompt_syntax", "emphasis"))
    | dict.fromkeys(("init_image", "strength", "mask", "mask_blur", "mask_crop"))
    | dict.fromkeys(("upscale", "upscale_strength", "upscale_mode"))
    | _NO_CONTROL
    | _NO_IP_ADAPTER,
    "prompt_syntax": {"emphasis": None},
    "prompt": {"label": ()},
}
_MASK: dict[str, Any] = dict.fromkeys(("mask", "mask_blur", "mask_crop", "strength"))
PICTURE = "picture_"  # prefix of a picture's height and width in the settings of a grid or sheet
AXES = "axes"  # a setting of X/Y sheets only
MAX_EMBEDDINGS = 64
FILE_SETTINGS = ("config", "vae", "prediction_type")  # settings of single files
BASE = "base_"  # prefix of the height and width that the model drew first, where the picture has others
INPUT_SETTINGS = ("init_image", "strength", "mask", "mask_blur", "mask_crop")  # settings of what a picture starts from
UPSCALE_SETTINGS = ("upscale", "upscale_strength", "upscale_mode")  # settings of enlarged pictures
OPTION_FILES = ("embedding", "lora")  # files beside the model, each as FILE[:VALUE]
CONTROL_SETTINGS = tuple(_NO_CONTROL)  # settings of pictures that ControlNets guide
IP_ADAPTER_SETTINGS = tuple(_NO_IP_ADAPTER)  # settings of pictures that IP-Adapters read
_LISTS = (
    *(*OPTION_FILES, "control", "control_scale", "control_start", "control_end"),
    *("ip_adapter", "ip_adapter_scale"),
)  # recorded where they are not empty
PROMPT_SETTINGS = (
    "negative_prompt",
    "clip_skip",
    "guidance_start",
    "guidance_stop",
    "prompt_syntax",
    "emphasis",
)  # settings of pictures of prompts only
# All settings of models that read prompts
TEXT_SETTINGS = (
    *(*PROMPT_SETTINGS, *INPUT_SETTINGS, *UPSCALE_SETTINGS),
    *(*OPTION_FILES, *CONTROL_SETTINGS, *IP_ADAPTER_SETTINGS),
)

CAPTION_SETTINGS = ("negative_prompt", *INPUT_SETTINGS, "lora")  # Z-Image has only these of TEXT_SETTINGS

# not recorded: the PNG that is read
_INSIDE = ("init_image_inside", "mask_inside", "control_image_inside", "ip_adapter_image_inside")
_PICTURES = ("control_image", "ip_adapter_image")  # lists of pictures
_UNUSUAL = ("guidance_start", "guidance_stop", "prompt_syntax", "emphasis")  # recorded where they are not the defaults


def _all_differ(values: tuple[Any, ...]) -> bool:
    return len(set(values)) == len(values)


ModelName = Annotated[
    str, Len(1), Predicate(lambda name: "\0" not in name), Wanted("a bundled name, a folder, a file or a hub id")
]
FileName = Annotated[str, Len(1), Predicate(lambda name: "\0" not in name), Wanted("a path")]
LoraNames = Annotated[
    tuple[FileName, ...],
    Len(0, MAX_EMBEDDINGS),
    Wanted(f"a list of up to {MAX_EMBEDDINGS} paths, each FILE or FILE:WEIGHT"),
]
EmbeddingNames = Annotated[
    tuple[FileName, ...],
    Len(0, MAX_EMBEDDINGS),
    Wanted(f"a list of up to {MAX_EMBEDDINGS} paths, each FILE or FILE:TOKEN"),
]
ControlNames = Annotated[
    tuple[FileName, ...],
    Len(0, MAX_LAYERS),
    Wanted(f"a list of up to {MAX_LAYERS} ControlNets: folders, files, bundled names or hub ids"),
]
IPAdapterNames = Annotated[
    tuple[FileName, ...],
    Len(0, MAX_LAYERS),
    Wanted(f"a list of up to {MAX_LAYERS} IP-Adapters: files, or NAME:FILE in folders or hub models"),
]
PictureNames = Annotated[tuple[FileName, ...], Len(0, MAX_LAYERS), Wanted(f"a list of up to {MAX_LAYERS} paths")]
Scales = Annotated[tuple[float, ...], Len(0, MAX_LAYERS), Wanted("a finite number for each ControlNet")]
IPAdapterScales = Annotated[tuple[float, ...], Len(0, MAX_LAYERS), Wanted("a finite number for each IP-Adapter")]
Shares = Annotated[tuple[Fraction, ...], Len(0, MAX_LAYERS), Wanted("a number from 0 to 1 for each ControlNet")]
LabelNames = Annotated[tuple[Label | str, ...], Wanted("the name or index of a label")]
PromptList = Annotated[
    tuple[Prompt, ...],
    Len(0, MAX_PICTURES),
    Wanted(f"a list of up to {MAX_PICTURES} texts, each of up to {MAX_PROMPT} characters of Unicode"),
]
ClipSkip = Annotated[int, Interval(ge=0, le=MAX_LAYERS)]  # skipped last layers of the text encoder, as in diffusers
SeedList = Annotated[tuple[Seed, ...], Len(1, MAX_PICTURES), Predicate(_all_differ)]
Seeds = Annotated[
    Seed | Literal["random"] | SeedList,
    Wanted(f"a seed from 0 to {MAX_SEED}, a list of different seeds such as 1,2,5-10, or random"),
]
Enlargement = Annotated[float, Interval(ge=1, le=MAX_UPSCALE)]
SubjectName = Literal["label", "prompt"]  # the setting that says what the pictures show


@dataclass(frozen=True)
class Request(Schema):
    """The pictures of one run: `label` x `seed` or `prompt` x `seed`.

    None leaves a choice to the model, and `complete` fills it in. Raises InputError for a value that its field does not
    take, from a flag or from a file.
    """

    SHOWN_AS: ClassVar = {
        "num_inference_steps": "steps",
        "guidance_scale": "cfg-scale",
        "negative_prompt": "negative-prompt",
        "clip_skip": "clip-skip",
        "guidance_start": "guidance-start",
        "guidance_stop": "guidance-stop",
        "prompt_syntax": "prompt-syntax",
        "num_images": "num-images",
        "prediction_type": "prediction-type",
        "init_image": "init-image",
        "mask_blur": "mask-blur",
        "mask_crop": "mask-crop",
        "upscale_strength": "upscale-strength",
        "upscale_mode": "upscale-mode",
        "control_image": "control-image",
        "control_scale": "control-scale",
        "control_start": "control-start",
        "control_end": "control-end",
        "guess_mode": "guess-mode",
        "ip_adapter": "ip-adapter",
        "ip_adapter_image": "ip-adapter-image",
        "ip_adapter_scale": "ip-adapter-scale",
        "image_encoder": "image-encoder",
    }

    model: ModelName = defaults.MODEL
    revision: Revision | None = None
    variant: Variant | None = None
    config: FileName | None = None  # the folder of the configs of a single file; None: fastdiff's own
    vae: FileName | None = None  # a single file with the VAE, instead of the model's
    prediction_type: PredictionType | None = None  # of a single file
    embedding: EmbeddingNames = ()  # embeddings of new tokens, each FILE or FILE:TOKEN
    lora: LoraNames = ()  # each FILE or FILE:WEIGHT
    scheduler: SchedulerName | None = None
    num_inference_steps: Steps | None = None
    eta: Fraction | None = None
    use_clipped_model_output: bool | None = None
    guidance_scale: NotNegative | None = None
    guidance_start: Fraction | None = None
    guidance_stop: Fraction | None = None
    dtype: DtypeName = defaults.DTYPE
    precision: Precision = defaults.PRECISION
    height: Pixels | None = None
    width: Pixels | None = None
    horizon: Horizon | None = None
    label: LabelNames = ()
    prompt: PromptList = ()
    negative_prompt: Prompt | None = None
    clip_skip: ClipSkip | None = None
    init_image: FileName | None = None  # the picture that image to image starts from
    init_image_inside: FileName | None = None  # the PNG that holds its bytes; None: it is a file
    strength: Fraction | None = None
    mask: FileName | None = None  # a picture that is white where `init_image` changes: inpainting
    mask_inside: FileName | None = None  # as `init_image_inside`
    mask_blur: Radius | None = None
    mask_crop: Margin | None = None  # padding_mask_crop of the library
    upscale: Enlargement | None = None  # 1 is None, so that it can be taken back
    upscale_strength: Fraction | None = None
    upscale_mode: UpscaleMode | None = None
    control: ControlNames = ()
    control_image: PictureNames = ()  # one for each ControlNet
    control_image_inside: tuple[FileName | None, ...] = ()  # as `init_image_inside`, for each
    control_scale: Scales = ()  # one for all, or one for each
    control_start: Shares = ()
    control_end: Shares = ()
    guess_mode: bool | None = None
    ip_adapter: IPAdapterNames = ()
    ip_adapter_image: PictureNames = ()  # all for a single IP-Adapter, or one for each
    ip_adapter_image_inside: tuple[FileName | None, ...] = ()  # as `init_image_inside`, for each
    ip_adapter_scale: IPAdapterScales = ()  # one for all, or one for each
    image_encoder: FileName | None = None  # the folder of the IP-Adapters' image encoder; None: beside the first
    prompt_syntax: PromptSyntax | None = None
    emphasis: Emphasis | None = None
    seed: Seeds = defaults.SEED
    num_images: Pictures | None = None

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], source: Recorded | None = None) -> "Request":
        """Make a request from the `flags` that are not None. They override the settings of a PNG, if given.

        A flag has the name of a field, or `prompt_file`, which names a file of more prompts, or `styles`, a file of
        styles, and `style`, the names of those that change the prompts.
        """
        return _styled(cls._of_flags(flags, source), flags.get("styles"), flags.get("style") or ())

    @classmethod
    def _of_flags(cls, flags: Mapping[str, Any], source: Recorded | None) -> "Request":
        names = {setting.name for setting in fields(cls)}
        given = {name: value for name, value in flags.items() if name in names and value is not None}
        given |= {name: tuple(given[name]) for name in ("label", *_PICTURES, *_LISTS) if name in given}
        given |= {"seed": parse_seed(given["seed"])} if "seed" in given else {}
        if "prompt" in given or flags.get("prompt_file") is not None:
            given["prompt"] = (*given.get("prompt", ()), *_prompts_of(flags.get("prompt_file")))
        if source is None:
            return cls(**{"model": defaults.model_of(labelled=bool(given.get("label")))} | given)
        recorded = cls._recorded(source)
        if "num_images" in given and isinstance(recorded.seed, tuple) and len(recorded.seed) == 1:
            given.setdefault("seed", recorded.seed[0])
        dropped: dict[str, Any] = {}
        for key, dependents in _DEPENDENTS.items():
            dropped |= dependents if key in given and given[key] != getattr(recorded, key) else {}
        if recorded.mask is not None and given.get("init_image", recorded.init_image) != recorded.init_image:
            dropped |= {} if "mask" in given else _MASK  # it fits the recorded picture alone
        return replace(recorded, **{**dropped, **given})

    @classmethod
    def _recorded(cls, source: Recorded) -> "Request":
        """Return the request whose settings are in a PNG."""
        if AXES in source.settings:
            remedy = "drop it onto the web page to draw it again, or use the PNG of one of its pictures"
            raise InputError(f"{source.path} is an X/Y sheet, which a single run cannot repeat; {remedy}")
        return cls.from_record(source.settings, source.path)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], source: str) -> "Request":
        """Return the request of a PNG's settings. InputError, which names `source`, if they cannot be used."""
        names = {setting.name for setting in fields(cls)} & record.keys() - {"num_images", *_INSIDE}
        size = _picture_size(record)
        try:
            return cls(**{name: _from_json(name, record[name]) for name in names - {"height", "width"}}, **size)
        except InputError as error:
            raise InputError(f"{source} holds settings that cannot be used: {error}") from None

    @property
    def subject(self) -> SubjectName | None:
        """The setting that says what the pictures show, or None."""
        return "prompt" if self.prompt else "label" if self.label else None

    @property
    def subjects(self) -> tuple[int | str, ...]:
        """The prompts or labels of the pictures."""
        return self.prompt or self.label

    def as_record(self) -> dict[str, Any]:
        """Return the settings of a completed request that all pictures of a run share, as a PNG stores them."""
        own = {"label", "prompt", "seed", "num_images", "height", "width", *_INSIDE}
        own |= {"mask", "mask_blur", "mask_crop", *_PICTURES}  # `Cell` records them
        own |= {"horizon"} if self.horizon is None else set()
        own |= {"precision"} if self.precision == defaults.PRECISION else set()
        own |= {name for name in FILE_SETTINGS if getattr(self, name) is None}
        own |= set() if self.prompt else set(PROMPT_SETTINGS)
        optional = (*_UNUSUAL, *INPUT_SETTINGS, *UPSCALE_SETTINGS, "guess_mode", "image_encoder")
        own |= {name for name in optional if getattr(self, name) is None}
        more: dict[str, Any] = {name: [*getattr(self, name)] for name in _LISTS if getattr(self, name)}
        if (self.upscale, self.mask_crop) != (None, None):
            more |= {f"{BASE}height": self.height, f"{BASE}width": self.width}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in {*own, *_LISTS}} | more


def _styled(request: Request, path: str | None, names: Sequence[str]) -> Request:
    """Return the request with styles of the file `path` applied to its prompts."""
    if path is None and not names:
        return request
    if path is None:
        raise InputError(f"style {shown(names[0])}: give the file that has it with --styles FILE")
    styles = Styles.read(path)
    if not names:
        raise InputError(f"styles {path}: give --style NAME too; the names are {styles.listed}")
    if not request.prompt:
        raise InputError(f"style {shown(names[0])} changes a prompt, and there is none; give --prompt or --prompt-file")
    negative = request.negative_prompt or ""
    texts = [styles.apply(names, prompt, negative) for prompt in request.prompt]
    return replace(
        request, prompt=tuple(text for text, _ in texts), negative_prompt=texts[0][1] or request.negative_prompt
    )


def _prompts_of(path: str | None) -> tuple[str, ...]:
    return () if path is None else read_prompts(path)


def _picture_size(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the height and width of a picture.

    A grid or sheet records them with a prefix, beside its own, and so does a picture that was enlarged or put back
    into another. The size of a trajectory's plot means nothing. Grids from before fastdiff had --height have no picture
    size, which leaves it to the model.
    """
    if "horizon" in record:
        return {}
    if f"{BASE}height" in record or f"{BASE}width" in record:
        return {name: record.get(f"{BASE}{name}") for name in ("height", "width")}
    prefix = PICTURE if isinstance(record.get("seed"), list) or AXES in record else ""
    return {name: record.get(f"{prefix}{name}") for name in ("height", "width")}


def _from_json(name: str, value: Any) -> Any:
    """Convert a recorded value for Request. A picture has one seed and one label or prompt (or null), a grid lists."""
    if name in ("label", "prompt") and value is None:
        return ()
    if name in ("label", "prompt", "seed"):
        return tuple(value) if isinstance(value, list) else (value,)
    return value


def parse_seed(text: str) -> int | str | tuple[int, ...]:
    """Parse `7`, `1,2,5-10` or `random` into an int, a tuple or "random", which `-1` means too, as in A1111.

    Request checks the values.
    """
    if text in ("random", "-1"):
        return "random"
    if re.fullmatch(r"[0-9]{1,20}", text):
        return int(text)
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,20})(?:-([0-9]{1,20}))?", part)
        if not match:
            raise InputError(f"seed: {shown(text)} is not {wanted(Seeds)}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_PICTURES - len(seeds):
            raise InputError(f"seed: {shown(text)}: give ascending ranges and at most {MAX_PICTURES} seeds")
        seeds.extend(range(first, last + 1))
    return tuple(seeds)


def check_settings(request: Request, card: ModelCard) -> None:
    """Raise InputError for a setting that does not fit the others, or that Z-Image does not have."""
    if request.emphasis is not None and request.prompt_syntax != "weighted":
        raise InputError(f"emphasis {request.emphasis}: plain prompts have none; give --prompt-syntax weighted")
    if not card.reads_captions:
        return
    usual = {"clip_skip": 0, "guidance_start": 0, "guidance_stop": 1, "prompt_syntax": SYNTAX, "upscale": 1}
    for name in TEXT_SETTINGS:
        value = getattr(request, name)
        if name not in CAPTION_SETTINGS and value not in (None, (), False, usual.get(name)):
            raise InputError(f"{Request.SHOWN_AS.get(name, name)}: Z-Image does not have it; leave it out")

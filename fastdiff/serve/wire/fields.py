"""The fields of a request: OpenAI's, and fastdiff's own beside them. An unknown field is refused by name."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Interval, Len
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from fastdiff.arguments import did_you_mean, shown
from fastdiff.checkpoints.json_files import parse_json
from fastdiff.kinds import MAX_SIDE, Fraction, NotNegative, Prompt, Seed, Steps
from fastdiff.sampler_names import SchedulerName
from fastdiff.schema import Wanted, wanted
from fastdiff.serve.wire.errors import ApiError, invalid

MAX_N = 10  # pictures a request, as in OpenAI's API
MAX_PARTIAL = 3
MAX_LORAS = 8
Format = Literal["png", "webp", "jpeg"]
Size = Annotated[str, Len(1, 20), Wanted('"auto" or "WIDTHxHEIGHT"')]
Name = Annotated[str, Len(0, 200), Wanted("a string of up to 200 characters")]
LoraNames = Annotated[
    list[Name], Len(0, MAX_LORAS), Wanted(f"a list of up to {MAX_LORAS} names, each NAME or NAME:WEIGHT")
]
SeedOrRandom = Annotated[Seed | Literal["random"], Wanted('a whole number from 0 to 4294967295, or "random"')]
_Auto = Annotated[Literal["auto"], Wanted('"auto", which is all that this server has')]
_Opaque = Annotated[Literal["auto", "opaque"], Wanted('"auto" or "opaque": pictures have no transparency')]
_Base64 = Annotated[Literal["b64_json"], Wanted('"b64_json": the server keeps no pictures, so it has no URLs')]
_Refused = Annotated[None, Wanted("supported by this server; leave it out")]
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})", re.ASCII)
Body = TypeVar("Body", bound="Fields")


class Fields(BaseModel):
    """The fields that generations and edits share. None leaves a choice to the server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: Prompt
    model: Name | None = None
    n: Annotated[int, Interval(ge=1, le=MAX_N)] | None = None
    size: Size | None = None
    quality: _Auto | None = None
    background: _Opaque | None = None
    moderation: _Auto | None = None
    output_format: Format | None = None
    output_compression: Annotated[int, Interval(ge=0, le=100)] | None = None
    response_format: _Base64 | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Interval(ge=0, le=MAX_PARTIAL)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    # fastdiff's own, with the defaults of `fastdiff sample`
    negative_prompt: Prompt | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: NotNegative | None = None
    seed: SeedOrRandom | None = None
    scheduler: SchedulerName | None = None
    loras: LoraNames | None = None
    # OpenAI's that have no meaning here; null is OpenAI's default
    style: _Refused = None
    complexity: _Refused = None
    frame_count: _Refused = None
    frame_duration_ms: _Refused = None
    svg: _Refused = None

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ("style", "complexity", "frame_count", "frame_duration_ms", "svg")

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """(width, height), or (None, None) for "auto". Raises ApiError for anything else."""
        if self.size in (None, "auto"):
            return None, None
        match = _SIZE.fullmatch(self.size or "")
        if match is None or not all(1 <= int(side) <= MAX_SIDE for side in match.groups()):
            raise invalid("size", f"{shown(self.size)} is not {wanted(Size)}, such as 512x512")
        return int(match[1]), int(match[2])

    @property
    def identifier(self) -> str | None:
        """The safety identifier that counts: `user` is its older name."""
        return self.safety_identifier or self.user or None

    def check(self) -> None:
        """Raise ApiError for fields that exclude each other."""
        _ = self.sides
        if self.partial_images and not self.stream:
            raise invalid("partial_images", f"{self.partial_images} pictures come in a stream; give stream: true")
        if self.output_compression not in (None, 100) and (self.output_format or "png") == "png":
            problem = f"{self.output_compression} is for webp and jpeg; give output_format, or leave it out"
            raise invalid("output_compression", problem)


class Generation(Fields):
    """The body of POST /v1/images/generations."""


class Edit(Fields):
    """The fields of POST /v1/images/edits beside its files: `image`, and `mask` or none."""

    strength: Fraction | None = None
    input_fidelity: _Refused = None
    markup: _Refused = None

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (*Fields.UNSUPPORTED, "input_fidelity", "markup")


def read_json(kind: type[Body], body: bytes) -> Body:
    """Return the fields of a JSON body. Raises ApiError."""

    def refuse(number: str) -> Any:
        raise ValueError(f"{shown(number)} is not a number of JSON")

    try:
        content = parse_json(body.decode("utf-8"), refuse)
    except ValueError as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ApiError(400, f"the body is not JSON that the server reads: {reason}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, 'the body is not a JSON object; give one such as {"prompt": "..."}', code="invalid_json")
    return read_fields(kind, content, strict=True)


def read_fields(kind: type[Body], values: Mapping[str, Any], *, strict: bool) -> Body:
    """Return checked fields. `strict`: values have their JSON types; else they may be texts of a form.

    Raises ApiError for the first field that is wrong.
    """
    try:
        fields = kind.model_validate(dict(values), strict=strict)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False, include_context=False)) from None
    fields.check()
    return fields


def _refusal(kind: type[Fields], errors: list[ErrorDetails]) -> ApiError:
    """Return the answer for the errors of pydantic. An unknown name is the likelier reason of a missing one."""
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    name, value = str(first["loc"][0]) if first["loc"] else "body", first["input"]
    if first["type"] == "extra_forbidden":
        known = [each for each in kind.model_fields if each not in kind.UNSUPPORTED]
        hint = did_you_mean(name, known) or f"the fields are {', '.join(known)}"
        message = f"{shown(name)[1:-1]}: this field is unknown; {hint}"
        return ApiError(400, message, param=name[:80], code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{name}: it is missing; give it", param=name, code="missing_required_parameter")
    field = kind.model_fields[name]
    words = next((each for each in field.metadata if isinstance(each, Wanted)), None)
    return invalid(name, f"{shown(value)} is not {words or wanted(field.annotation)}")

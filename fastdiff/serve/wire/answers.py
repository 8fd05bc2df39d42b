"""The answers: OpenAI's objects, with the seed and the settings of each picture beside them."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fastdiff.serve.wire.fields import Format

TOKEN = 16  # a token is a square of so many pixels a side, as in models with latents of 8 pixels and patches of 2
Endpoint = Literal["image_generation", "image_edit"]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class TokenDetails(_Answer):
    """Tokens of pictures and of texts."""

    image_tokens: int
    text_tokens: int


class Usage(_Answer):
    """The tokens of a request. Texts are counted by the model's tokenizer."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int

    @classmethod
    def of(cls, text_tokens: int, input_pictures: int, output_pictures: int) -> "Usage":
        """Return the usage of a request with so many tokens of each kind."""
        given = text_tokens + input_pictures
        return cls(
            input_tokens=given,
            input_tokens_details=TokenDetails(image_tokens=input_pictures, text_tokens=text_tokens),
            output_tokens=output_pictures,
            output_tokens_details=TokenDetails(image_tokens=output_pictures, text_tokens=0),
            total_tokens=given + output_pictures,
        )


class Picture(_Answer):
    """A picture of an answer."""

    b64_json: str
    seed: int
    settings: dict[str, Any]  # as in the PNG of `fastdiff sample`


class Images(_Answer):
    """The answer of a request without `stream`."""

    created: int
    background: Literal["opaque"] = "opaque"
    data: list[Picture]
    output_format: Format
    safety_identifier: str | None = None
    size: str
    usage: Usage


class _Event(_Answer):
    b64_json: str
    background: Literal["auto", "opaque"] = "opaque"
    created_at: int
    image_index: int  # which of the `n` pictures
    output_format: Format
    quality: Literal["auto"] = "auto"
    size: str


class PartialImage(_Event):
    """An event of a stream: a picture that is not finished yet."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    partial_image_index: int


class Completed(_Event):
    """An event of a stream: a finished picture."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    safety_identifier: str | None = None
    seed: int
    settings: dict[str, Any]
    usage: Usage


class Model(_Answer):
    """A model that the server offers."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "fastdiff"


class Models(_Answer):
    """The answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


def picture_tokens(width: int, height: int) -> int:
    """Return the tokens of a picture."""
    return -(-width // TOKEN) * -(-height // TOKEN)


def as_event(event: PartialImage | Completed) -> bytes:
    """Return a server-sent event."""
    return f"event: {event.type}\ndata: {event.model_dump_json(exclude_none=True)}\n\n".encode()


def as_error(body: Mapping[str, Any]) -> bytes:
    """Return the server-sent event of an error, whose `body` is the same as without a stream."""
    return f"event: error\ndata: {json.dumps({'type': 'error', **body})}\n\n".encode()

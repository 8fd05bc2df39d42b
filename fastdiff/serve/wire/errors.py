"""The errors of the API, in OpenAI's form: {"error": {"message", "type", "param", "code"}}. A message is one line."""

import logging
import re
from collections.abc import Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from fastdiff.errors import DeviceLostError, InputError, NonFiniteError

FINAL = {"x-should-retry": "false"}  # OpenAI's client does not send the request again
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FLAGS = {  # words of the command line, and the fields of the API
    "negative-prompt": "negative_prompt",
    "cfg-scale": "guidance_scale",
    "num-images": "n",
    "init-image": "image",
    "try --dtype float32, or check": "check",
}
_FIRST_WORDS = {  # at the beginning of a message
    "steps": "num_inference_steps",
    "lora": "loras",
}
_NAMED = (  # fields that errors of a run begin with
    *("prompt", "negative_prompt", "n", "seed", "num_inference_steps", "guidance_scale", "scheduler", "loras"),
    *("image", "mask", "strength", "model"),
)
_FIRST = re.compile(r"[\w-]+(?=[: ])")
_SIZE = re.compile(r"(?:size|width|height)\b[^:]*: ")


class ApiError(Exception):
    """An error answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """status: of HTTP. param: the field that is wrong. code: a word for programs. headers: of the answer."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, " ".join(message.split()), param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The `type` of the error."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """The client closed its connection, or reads no more. Nobody gets an answer."""


def answer_of(error: ApiError) -> Response:
    """Return the HTTP answer for an error."""
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def invalid(param: str, problem: str) -> ApiError:
    """Return the error for an invalid field."""
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


def of_status(status: int) -> ApiError:
    """Return the error for a status that the web framework answers, such as 404."""
    words = {404: "this path does not exist; see /openapi.json", 405: "the path does not take this method"}
    return ApiError(status, words.get(status, HTTPStatus(status).phrase.lower()))


def explain(error: BaseException) -> ApiError:
    """Return the answer for an error of a run. An unexpected error is logged with its traceback, and says nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return _of_input(str(error))
    if isinstance(error, NonFiniteError):
        return ApiError(500, _renamed(str(error)), code="not_finite", headers=FINAL)
    if isinstance(error, MemoryError):
        message = "out of memory; ask for fewer pictures or a smaller size"
        return ApiError(503, message, code="out_of_memory", headers=FINAL)
    if isinstance(error, DeviceLostError):
        return ApiError(503, "the GPU failed, and the server ends; try again later", code="device_lost")
    if isinstance(error, CancelledError):
        return ApiError(503, "the server stops; send the request again", code="stopping")
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return ApiError(500, "the request failed; the server's log has the reason", code="internal_error", headers=FINAL)


def _of_input(text: str) -> ApiError:
    text = _renamed(text)
    if _SIZE.match(text):
        return ApiError(400, f"size: {text.removeprefix('size: ')}", param="size", code="invalid_value")
    first = _FIRST.match(text)
    if first is None:
        return ApiError(400, text)
    name = _FIRST_WORDS.get(first[0], first[0])
    text = name + text[first.end() :]
    return ApiError(400, text, param=name if name in _NAMED else None, code="invalid_value")


def _renamed(text: str) -> str:
    for theirs, ours in _FLAGS.items():
        text = text.replace(theirs, ours)
    return re.sub(r"(?<![\w-])--(?=[a-z])", "", text)  # of flags; a model's name may hold dashes

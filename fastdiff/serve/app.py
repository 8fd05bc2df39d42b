"""The web application: paths, errors in OpenAI's form, and the document of the API."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import fastdiff
from fastdiff.errors import InputError
from fastdiff.serve import endpoints
from fastdiff.serve.guard import Guard
from fastdiff.serve.studio import Studio
from fastdiff.serve.wire import answers
from fastdiff.serve.wire.errors import ApiError, answer_of, explain, of_status
from fastdiff.serve.wire.fields import Edit, Fields, Generation

ERROR = {"description": 'An error in OpenAI\'s form: {"error": {"message", "type", "param", "code"}}'}
_FILE = {"type": "string", "format": "binary"}


def build_app(studio: Studio) -> FastAPI:
    """Return the application that draws with a studio."""
    app = FastAPI(
        title="fastdiff",
        version=fastdiff.__version__,
        summary="OpenAI's images API, drawn by diffusion models",
        docs_url=None,  # its scripts come from other hosts
        redoc_url=None,
    )
    app.state.studio = studio
    add = app.add_api_route
    tags: dict[str, Any] = {"responses": {"4XX": ERROR, "5XX": ERROR}}
    streams = {200: {"model": answers.Images, "content": {"text/event-stream": {}}}}
    pictures: dict[str, Any] = {"methods": ["POST"], "responses": {**streams, **tags["responses"]}}
    add("/v1/images/generations", endpoints.generate, openapi_extra=_body(Generation, "application/json"), **pictures)
    add("/v1/images/edits", endpoints.edit, openapi_extra=_body(Edit, "multipart/form-data"), **pictures)
    add("/v1/models", endpoints.list_models, response_model=answers.Models, **tags)
    add("/v1/models/{name:path}", endpoints.get_model, response_model=answers.Model, **tags)
    add("/health", endpoints.health)
    add("/ready", endpoints.ready)
    add("/metrics", endpoints.metrics)
    for kind in (ApiError, InputError, HTTPException):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(Guard, studio=studio)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    """Return the answer for an error of an endpoint."""
    found = of_status(error.status_code) if isinstance(error, HTTPException) else explain(error)
    request.app.state.studio.metrics.failed(found)
    return answer_of(found)


def _body(kind: type[Fields], media: str) -> dict[str, Any]:
    """Return OpenAPI's description of a body. The endpoints read bodies themselves, within limits."""
    schema = kind.model_json_schema()
    for name in kind.UNSUPPORTED:
        del schema["properties"][name]
    if kind is Edit:
        schema["properties"] = {"image": _FILE, "mask": _FILE, **schema["properties"]}
        schema["required"] = ["image", *schema["required"]]
    return {"requestBody": {"required": True, "content": {media: {"schema": schema}}}}

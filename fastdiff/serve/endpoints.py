"""The endpoints. A request holds a place until its answer is sent or its client is gone."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from fastdiff.serve.answering import answer
from fastdiff.serve.orders import uploads
from fastdiff.serve.orders.translation import order_of
from fastdiff.serve.studio import Studio
from fastdiff.serve.wire.answers import Model, Models
from fastdiff.serve.wire.errors import ApiError
from fastdiff.serve.wire.fields import Edit, Generation, read_fields, read_json

MOST_JSON = 2**20  # bytes of a body without pictures
MOST_FILES, MOST_FIELDS = 4, 64  # of a form
DECODERS = 2  # uploads that are decoded at a time: each may have many pixels
Result = TypeVar("Result")


async def generate(request: Request) -> Response:
    """Draw pictures from a prompt."""
    if _media_type(request) != "application/json":
        raise ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
    fields = read_json(Generation, await _json_body(request))
    studio = _studio(request)
    async with AsyncExitStack() as stack:
        place = stack.enter_context(studio.admission.place(request.state.key))
        if fields.stream:
            place.open_stream()
        order = await to_thread.run_sync(order_of, fields, studio.offers, studio.limits)
        return await answer(request, studio, order, bool(fields.stream), stack)


async def edit(request: Request) -> Response:
    """Draw pictures from a picture: image to image, or inpainting with a mask that is transparent where it paints."""
    if _media_type(request) != "multipart/form-data":
        raise ApiError(415, "the body must be a form with files; send it as multipart/form-data")
    studio = _studio(request)
    async with AsyncExitStack() as stack:
        place = stack.enter_context(studio.admission.place(request.state.key))
        options: dict[str, Any] = {"max_files": MOST_FILES, "max_fields": MOST_FIELDS, "max_part_size": MOST_JSON}
        form = await stack.enter_async_context(request.form(**options))
        fields = read_fields(Edit, uploads.texts(form), strict=False)
        if fields.stream:
            place.open_stream()
        folder = stack.enter_context(uploads.new_folder())
        files = await uploads.read(form)
        pictures = await _decoding(request, lambda: uploads.keep(files, folder))
        order = await _decoding(request, lambda: order_of(fields, studio.offers, studio.limits, pictures))
        return await answer(request, studio, order, bool(fields.stream), stack)


async def list_models(request: Request) -> Models:
    """List the models on offer, the default one first."""
    offers = _studio(request).offers
    return Models(data=[Model(id=name, created=offers.created) for name in offers.ids])


async def get_model(request: Request, name: str) -> Model:
    """Return a model on offer."""
    offers = _studio(request).offers
    return Model(id=offers.card(name).name, created=offers.created)


async def health() -> Response:
    """Return 200 while the process lives."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Return 200 while new requests are taken and the models are loaded, and 503 otherwise."""
    studio = _studio(request)
    if studio.is_ready:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "stopping" if studio.admission.closed else "loading"}, status_code=503)


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    data, media = await to_thread.run_sync(_studio(request).metrics.text)
    return Response(data, media_type=media)


def _studio(request: Request) -> Studio:
    return request.app.state.studio


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _json_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_JSON:
            raise ApiError(413, f"the body is too large; JSON may have {MOST_JSON:,} bytes", code="too_large")
    return bytes(body)


async def _decoding(request: Request, function: Callable[[], Result]) -> Result:
    """Call a function that decodes uploads in a thread, a few at a time."""
    state = request.app.state
    if not hasattr(state, "decoding"):
        state.decoding = CapacityLimiter(DECODERS)
    return await to_thread.run_sync(function, limiter=state.decoding)

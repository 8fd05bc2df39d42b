"""The answers of requests that draw: one JSON object, or a stream of server-sent events. A lost client ends the run."""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from fastdiff.serve.orders.jobs import Job, Made
from fastdiff.serve.orders.translation import Order
from fastdiff.serve.studio import Studio
from fastdiff.serve.wire.answers import Completed, Images, PartialImage, Picture, as_error, as_event
from fastdiff.serve.wire.errors import FINAL, ApiError, ClientGoneError, explain

HEARTBEAT = 15.0  # seconds between two signs of life of a stream: proxies close silent connections
BEAT = b": drawing\n\n"  # a comment, which clients skip
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
Result = TypeVar("Result")
Write = Callable[[bytes], Awaitable[None]]


async def answer(request: Request, studio: Studio, order: Order, stream: bool, stack: AsyncExitStack) -> Response:
    """Return the answer of an order, or raise its error. `stack`: what the request holds while it is drawn."""
    if stream:
        return _Stream(studio, order, stack.pop_all())
    made: list[Made] = []

    async def draw() -> None:
        async for each in _pictures(studio, order):
            made.append(each)

    await _while_connected(request.receive, _in_time(studio, draw))
    return Response(await to_thread.run_sync(_json_of, order, made), media_type="application/json")


async def _pictures(studio: Studio, order: Order):
    """Yield the pictures of an order. An end of any kind ends its drawing."""
    job = Job(order, studio.metrics.begun)
    studio.metrics.arrived(job)
    try:
        await studio.until_loaded()
        await to_thread.run_sync(studio.drawer.begin, job)
        async for made in job.pictures():
            if made.partial is None:
                studio.metrics.finished(order.run.card.name)
            yield made
    finally:
        job.cancel()
        studio.metrics.ended(job)


def _in_time(studio: Studio, work: Callable[[], Awaitable[Result]]) -> Callable[[], Awaitable[Result]]:
    """Return `work` with the time limit of requests."""

    async def limited() -> Result:
        try:
            with anyio.fail_after(studio.limits.seconds):
                return await work()
        except TimeoutError:
            message = f"the request took more than {studio.limits.seconds:g} s; try again later"
            raise ApiError(504, message, code="timeout", headers=FINAL) from None

    return limited


async def _while_connected(receive: Receive, work: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of `work`. Cancels it and raises ClientGoneError once the client has disconnected."""
    results: list[Result] = []
    errors: list[Exception] = []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            results.append(await work())
        except Exception as error:  # the group would wrap it
            errors.append(error)
        group.cancel_scope.cancel()
    if errors:
        raise errors[0]
    if not results:
        raise ClientGoneError
    return results[0]


class _Stream(Response):
    """Server-sent events: partial pictures, and each picture when it is finished."""

    def __init__(self, studio: Studio, order: Order, stack: AsyncExitStack) -> None:
        self._studio, self._order, self._stack = studio, order, stack
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lock = anyio.Lock()

        async def write(data: bytes, more: bool = True) -> None:
            async with lock:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async with self._stack:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await _while_connected(receive, lambda: self._write_events(write))
            await write(b"", False)

    async def _write_events(self, write: Write) -> None:
        errors: list[Exception] = []  # a group would wrap them

        async def beat() -> None:
            try:
                while True:
                    await anyio.sleep(HEARTBEAT)
                    await write(BEAT)
            except ClientGoneError as error:
                errors.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            try:
                await _in_time(self._studio, lambda: self._write_pictures(write))()
            except Exception as error:
                errors.append(error)
            group.cancel_scope.cancel()
        if errors and isinstance(errors[0], ClientGoneError):
            raise errors[0]
        if errors:
            found = explain(errors[0])
            self._studio.metrics.failed(found)
            await write(as_error(found.body))

    async def _write_pictures(self, write: Write) -> None:
        async for made in _pictures(self._studio, self._order):
            await write(await to_thread.run_sync(_event_of, self._order, made))


def _json_of(order: Order, made: list[Made]) -> bytes:
    """Return the answer of a request without `stream`."""
    pictures = [Picture(b64_json=each.picture.base64, seed=each.seed, settings=dict(each.record)) for each in made]
    answer = Images(
        created=int(time.time()),
        data=pictures,
        output_format=order.form.name,
        safety_identifier=order.identifier,
        size="{}x{}".format(*order.size),
        usage=order.usage(len(made)),
    )
    return answer.model_dump_json(exclude_none=True).encode()


def _event_of(order: Order, made: Made) -> bytes:
    """Return the event of a picture."""
    common: Mapping[str, Any] = {
        "b64_json": made.picture.base64,
        "created_at": int(time.time()),
        "image_index": made.place,
        "output_format": order.form.name,
        "size": "{}x{}".format(*order.size),
    }
    if made.partial is not None:
        kind = f"{order.endpoint}.partial_image"
        return as_event(PartialImage(type=kind, partial_image_index=made.partial, **common))  # type: ignore[arg-type]
    return as_event(
        Completed(
            type=f"{order.endpoint}.completed",  # type: ignore[arg-type]
            safety_identifier=order.identifier,
            seed=made.seed,
            settings=dict(made.record),
            usage=order.usage(1),
            **common,
        )
    )

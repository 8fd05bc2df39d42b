"""One-line answers where Gradio would send a traceback, or nothing."""

import errno
import inspect
import re
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import gradio as gr
from gradio.block_function import BlockFunction
from gradio.components.api_component import Api
from gradio.queueing import Queue
from gradio.route_utils import FnIndexInferError
from gradio_client.utils import is_file_obj_with_meta  # type: ignore[import-untyped]
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PICTURES = ("init_image", "mask", "control_image", "ip_adapter_image")  # parameters of the API that are files
MOST_NAMES = 200  # characters
_CALLS = re.compile(r"/(call|run|api|queue)/")
_RESULT = re.compile(r"/call/(?:v2/)?[^/]+/([^/]+)/?")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckedBlocks(gr.Blocks):
    """A page that rejects invalid values of an event, before Gradio fetches any link."""

    def validate_inputs(self, block_fn: BlockFunction, inputs: list[Any]) -> None:
        names = _names(block_fn)
        missing = block_fn.inputs[len(inputs) :]
        if all(isinstance(block, Api) and block.value is None for block in missing):
            inputs += [None] * len(missing)  # the client may be older than the last parameters
        if len(inputs) < len(names):
            some = textwrap.shorten(", ".join(names), MOST_NAMES, placeholder=" ...")
            wanted = f"give {len(names)}, with null for each default: {some}"
            raise gr.Error(f"{block_fn.api_name}: {len(inputs)} values are not enough; {wanted}", print_exception=False)
        for block, name, value in zip(block_fn.inputs, names, inputs, strict=False):
            files = _files(value)
            if files and not (isinstance(block, gr.File | gr.Image) or (isinstance(block, Api) and name in PICTURES)):
                raise gr.Error(f"{name}: a file is not allowed here", print_exception=False)
            if any("://" in str(file["path"]) for file in files):
                raise gr.Error(f"{name}: give a file, not a link", print_exception=False)


def _names(block_fn: BlockFunction) -> list[str]:
    """Return the public names of the inputs: API parameters, or labels on the page."""
    if all(isinstance(block, Api) for block in block_fn.inputs) and block_fn.fn is not None:
        return list(inspect.signature(block_fn.fn).parameters)[: len(block_fn.inputs)]
    return [getattr(block, "label", None) or type(block).__name__ for block in block_fn.inputs]


def _files(value: Any) -> list[dict]:
    """Return the files in a JSON value, at any depth. Gradio would open them."""
    if is_file_obj_with_meta(value):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [file for part in parts for file in _files(part)]


class Failures:
    """ASGI middleware around Gradio that answers failed requests in one line."""

    def __init__(self, app: ASGIApp, queue: Queue, uploads: Path) -> None:
        self.app, self.queue, self.uploads = app, queue, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        reply = self._unknown_job(scope)
        try:
            await (reply or self.app)(scope, receive, watched)
        except Exception as error:
            reply = None if started else self._reply(scope["path"], error)
            if reply is None:
                raise
            await reply(scope, receive, send)

    def _unknown_job(self, scope: Scope) -> Response | None:
        """Return the answer to a request for unknown events, or None. Gradio's own answer breaks off."""
        queue, result = self.queue, _RESULT.search(scope["path"]) if scope["method"] == "GET" else None
        if result:
            known = [queue.event_ids_to_events, queue.pending_messages_per_session]
            if not any(result[1] in ids for ids in (*known, *queue.pending_event_ids_session.values())):
                return PlainTextResponse(f"job {result[1][:80]!r} is unknown; it may have ended", 404)
        if scope["path"].endswith("/queue/data"):
            session = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[0]
            if session not in queue.pending_messages_per_session:
                line = '{"msg": "unexpected_error", "message": "this session has no jobs", "success": false, '
                return Response(f'data: {line}"session_not_found": true}}\n\n', media_type="text/event-stream")
        return None

    def _reply(self, path: str, error: Exception) -> Response | None:
        """Return the answer to a full disk or to an error of the client, or None."""
        if isinstance(error, OSError) and error.errno in _FULL:
            if path.endswith("/upload"):
                self._remove_partial_uploads()
            return PlainTextResponse("the server's disk is full; free some space, then try again", 507)
        if _CALLS.search(path) and isinstance(error, FnIndexInferError | KeyError):
            return PlainTextResponse("no such function; the API has /generate and /models", 404)
        if _CALLS.search(path) and isinstance(error, TypeError | ValueError):
            return PlainTextResponse(f"invalid call: {' '.join(str(error).split())}", 400)
        return None

    def _remove_partial_uploads(self) -> None:
        """Remove unfinished uploads, which have no folder yet. On a full disk, no other upload can finish either."""
        for path in self.uploads.iterdir():
            with suppress(OSError):
                if path.is_file():
                    path.unlink()

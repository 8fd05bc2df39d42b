"""The server as a door: requests without sockets. Each ends in pictures, or in a 4xx of one line."""

import asyncio
import functools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from hypothesis import strategies as st
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.hosting.models import Models
from fastdiff.requests.defaults import MODEL
from fastdiff.serve.app import build_app
from fastdiff.serve.drawing.engine_drawer import EngineDrawer
from fastdiff.serve.drawing.offers import Offers
from fastdiff.serve.keys import Keys
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.studio import Studio
from fastdiff.serve.wire.fields import Edit
from tests.fuzz.doors.outcomes import Options, guarded
from tests.fuzz.named.pictures import FORMS
from tests.fuzz.values import JSON, PLAIN, WORDS

GENERATE, EDIT = "/v1/images/generations", "/v1/images/edits"
SOUND = {"prompt": '"a cat"', "num_inference_steps": "1", "size": '"16x16"'}
FIELDS = [*Edit.model_fields, "unknown", "__class__", "model_config", "stream_options", "image", "prompt[]", ""]
LIMITS = Limits(work=0.02, side=64, seconds=30, body=2**22)
BODIES = {
    **{name: text.encode("utf-8", "surrogatepass") for name, text in JSON.items()},
    "nothing": b"",
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "BOM": b'\xef\xbb\xbf{"prompt": "a", "num_inference_steps": 1, "size": "16x16"}',
    "twice": b'{"prompt": "a", "prompt": "b", "num_inference_steps": 1, "size": "16x16"}',
    "a form": b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--\r\n',
    "a file without an end": b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nabc',
    "many parts": b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * 1000,
    "long headers": b"--x\r\n" + b"A: b\r\n" * 100_000,
    "zeros": bytes(2**20 + 1),
    "too large": bytes(2**22 + 1),
}
HEADERS = ("content-type", "content-length", "authorization", "host", "origin", "transfer-encoding", "cookie", "expect")
TYPES = ("application/json", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "text/plain", "")
PATHS = (GENERATE, EDIT, "/v1/models", "/v1/models/../../etc/passwd", "/metrics", "/ready", "/", "//", "/v1/images/\0")


def requests() -> st.SearchStrategy[tuple[Any, ...]]:
    """Return the edits (none), the door, what to send, and its options."""
    values = st.sampled_from(PLAIN) | st.sampled_from(sorted(JSON))
    fields = st.lists(st.tuples(st.sampled_from(FIELDS), values), max_size=3)
    texts = st.lists(st.tuples(st.sampled_from(FIELDS), st.sampled_from(sorted(WORDS))), max_size=2)
    pictures = st.lists(
        st.tuples(st.sampled_from(["image", "image", "image[]", "mask"]), st.sampled_from(sorted(FORMS))), max_size=2
    )
    names = st.tuples(st.just("filename"), st.sampled_from(sorted(WORDS)))
    raw = st.tuples(
        st.tuples(st.just("body"), st.sampled_from(sorted(BODIES))),
        st.tuples(st.just("path"), st.sampled_from(PATHS)),
        st.tuples(st.just("type"), st.sampled_from(TYPES)),
        st.tuples(st.sampled_from(HEADERS), st.sampled_from(sorted(WORDS))),
    )
    kinds = {
        "json": fields.map(tuple),
        "form": st.tuples(texts, pictures, names).map(lambda drawn: (*drawn[0], *drawn[1], drawn[2])),
        "raw": raw.flatmap(lambda drawn: st.sampled_from([drawn, drawn[:3]])),
        "gone": fields.map(tuple),
    }
    return st.sampled_from(sorted(kinds)).flatmap(lambda kind: kinds[kind].map(lambda each: ((), "server", kind, each)))


@functools.cache
def _served() -> tuple[Studio, FastAPI]:
    offers = Offers([MODEL], Models(device="cpu"), "full")
    studio = Studio(offers, LIMITS, Keys(), EngineDrawer(offers, LIMITS))
    studio.load()
    studio.loaded.result()
    return studio, build_app(studio)


@guarded
def call(folder: Path, what: str, options: Options) -> list[str]:
    """Send a request, and check its answer."""
    studio, _ = _served()
    with _temporary(folder.parent / "out"):
        status, answer = asyncio.run(_send(*_request(what, options), leaves=what == "gone"))
    problems = [] if not studio.admission.here else [f"{studio.admission.here} requests are stuck"]
    if status is None:
        return problems if what == "gone" else [*problems, "no answer"]
    text = answer.decode()
    if status >= 500 or "Traceback" in text or str(folder.parent) in text:
        return [*problems, f"answered {status}: {text[:200]}"]
    error = _error_of(text)
    if error is None and status == 200:
        return problems
    if error is None or "\n" in error["message"] or not error["message"]:
        return [*problems, f"answered {status} without one line: {text[:200]}"]
    if problems:
        return problems
    raise InputError(error["message"])


def _error_of(text: str) -> dict[str, Any] | None:
    """Return the error of a JSON answer or of the last event of a stream."""
    data = text.rstrip().rpartition("data: ")[2]
    try:
        return json.loads(data).get("error")
    except (ValueError, AttributeError):
        return None


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """Let the server put uploads into a folder."""
    folder.mkdir(exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _request(what: str, options: Options) -> tuple[str, dict[str, bytes], bytes]:
    """Return the path, the headers and the body of a request."""
    headers = {"host": b"localhost", "content-type": b"application/json"}
    if what in ("json", "gone"):
        fields = SOUND | {name: JSON[value] for name, value in options}
        body = "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in fields.items()) + "}"
        return GENERATE, headers, body.encode("utf-8", "surrogatepass")
    if what == "form":
        return EDIT, headers | {"content-type": b"multipart/form-data; boundary=x"}, _form(options)
    given = dict(options)
    if what != "raw" or "body" not in given:
        return GENERATE, headers, b"{}"
    headers |= {"content-type": given.pop("type").encode()}
    path, body = given.pop("path"), BODIES[given.pop("body")]
    return path, headers | {name: WORDS[word].encode(errors="replace") for name, word in given.items()}, body


def _form(options: Options) -> bytes:
    """Return the body of a form: texts of WORDS, and pictures of FORMS."""
    levels = np.linspace(0, 255, 16 * 16 * 3).reshape(16, 16, 3).astype(np.uint8)
    name = next((WORDS[word] for field, word in options if field == "filename"), "a.png")
    parts: list[tuple[str, str | None, bytes]] = [
        *((field, None, value.strip('"').encode()) for field, value in {**SOUND, "num_inference_steps": "2"}.items())
    ]
    for field, value in options:
        if value in FORMS and field in ("image", "image[]", "mask"):
            parts.append((field, name, FORMS[value](Image.fromarray(levels))))
        elif field != "filename":
            parts = [each for each in parts if each[0] != field]
            parts.append((field, None, WORDS[value].encode("utf-8", "surrogatepass")))
    lines = []
    for field, file, data in parts:
        of_file = "" if file is None else f'; filename="{file}"'
        head = f'--x\r\nContent-Disposition: form-data; name="{field}"{of_file}\r\n\r\n'
        lines.append(head.encode("utf-8", "surrogatepass") + data + b"\r\n")
    return b"".join([*lines, b"--x--\r\n"])


async def _send(path: str, headers: dict[str, bytes], body: bytes, leaves: bool) -> tuple[int | None, bytes]:
    """Return the status and the body of the answer. leaves: the client closes the connection once it has sent."""
    _, app = _served()
    messages = [{"type": "http.request", "body": body[:100], "more_body": True}]
    messages.append({"type": "http.request", "body": body[100:], "more_body": False})
    sent: list[dict[str, Any]] = []
    wait = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        if not leaves:
            await wait.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    length = {"content-length": str(len(body)).encode()}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST" if path.startswith("/v1/images") else "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value) for name, value in (length | headers).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await app(scope, receive, send)
    status = next((each["status"] for each in sent if each["type"] == "http.response.start"), None)
    return status, b"".join(each.get("body", b"") for each in sent)

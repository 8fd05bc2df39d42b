"""Fixtures for the tests of the server: a server with a tiny model on a free port."""

import base64
import contextlib
import io
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from PIL import Image

from fastdiff.hosting.catalogue.offered import OptionFiles
from fastdiff.hosting.models import Models
from fastdiff.serve.drawing.engine_drawer import EngineDrawer
from fastdiff.serve.drawing.offers import Offers
from fastdiff.serve.keys import Keys
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.server import Server, serving
from fastdiff.serve.studio import Studio
from tests.support.waiting import TIMEOUT, wait_for

pytestmark = pytest.mark.usefixtures("one_thread")
PATIENCE = 60  # seconds; only for what hangs
SMALL = {"num_inference_steps": 2, "size": "16x16"}


@dataclass(frozen=True)
class Served:
    """A running server and a client for it."""

    server: Server
    http: httpx.Client

    @property
    def studio(self) -> Studio:
        return self.server.studio

    def generate(self, prompt: str = "a cat", **fields) -> httpx.Response:
        return self.http.post("/v1/images/generations", json={"prompt": prompt, **SMALL, **fields})

    def edit(self, files: dict, prompt: str = "a cat", **fields) -> httpx.Response:
        form = {name: str(value) for name, value in {"prompt": prompt, **SMALL, **fields}.items()}
        return self.http.post("/v1/images/edits", data=form, files=files)


@contextlib.contextmanager
def served_by(
    *models: Path | str, keys: Keys | None = None, lora_dir: Path | None = None, warm=(), **limits
) -> Iterator[Served]:
    """Serve models while the block runs."""
    hosted = Models(device="cpu", files=OptionFiles(lora_dir), most=len(models))
    offers, own = Offers([*map(str, models)], hosted, "full"), Limits(**limits)
    studio = Studio(offers, own, keys or Keys(), EngineDrawer(offers, own))
    with serving(studio) as server, httpx.Client(base_url=server.address, timeout=PATIENCE) as http:
        studio.load(warm)
        yield Served(server, http)


@pytest.fixture(scope="session")
def sd1(text_folder) -> Path:
    return text_folder("sd1")


@pytest.fixture(scope="module")
def served(sd1, one_thread) -> Iterator[Served]:
    """A server with a tiny Stable Diffusion 1."""
    with served_by(sd1) as served:
        served.studio.loaded.result(TIMEOUT)
        yield served


@pytest.fixture
def png() -> Callable[..., bytes]:
    """Returns the bytes of a picture of one colour."""

    def make(colour="red", size=(16, 16), mode="RGB", kind="png") -> bytes:
        buffer = io.BytesIO()
        Image.new(mode, size, colour).save(buffer, kind)
        return buffer.getvalue()

    return make


@dataclass
class Gate:
    """Holds the steps of a server's engine."""

    open: threading.Event
    waits: threading.Event


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    """Every step waits until the gate is open."""
    from fastdiff.diffusion.shared_steps import Company

    gate, take = Gate(threading.Event(), threading.Event()), Company.take

    def held(*args):
        gate.waits.set()
        assert gate.open.wait(TIMEOUT)
        return take(*args)

    monkeypatch.setattr(Company, "take", held)
    yield gate
    gate.open.set()


def pictures_of(answer: httpx.Response) -> list[bytes]:
    """Return the files of an answer."""
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(each["b64_json"]) for each in answer.json()["data"]]


def error_of(answer: httpx.Response) -> dict:
    """Return the error of an answer. Its message is one line."""
    assert answer.status_code >= 400, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    return error


def wait_until_empty(served: Served) -> None:
    """Wait until no request is here."""
    wait_for(lambda: not served.studio.admission.here, PATIENCE)


def raw(served: Served) -> socket.socket:
    """Return a connection to a server."""
    return socket.create_connection(("127.0.0.1", int(served.server.address.rpartition(":")[2])), TIMEOUT)


def request_of(
    body: bytes, *, length: int | None = None, path="/v1/images/generations", headers: dict | None = None
) -> bytes:
    """Return the bytes of a POST request, which may promise a longer body."""
    own = {"host": "localhost", "content-type": "application/json", "connection": "close", **(headers or {})}
    if "transfer-encoding" not in own:
        own["content-length"] = str(len(body) if length is None else length)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body

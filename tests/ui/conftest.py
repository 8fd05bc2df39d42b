"""Fixtures for the tests of the web page: a served page, model folders and PNG files."""

import asyncio
import functools
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.single_files import cards
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.models import Models
from fastdiff.requests.styles import Style, Styles
from fastdiff.runs import drawing
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.server import serving
from fastdiff.ui.shared import Shared
from tests.checkpoints.single_files import ldm
from tests.ui.browser.actions import DESKTOP, TIMEOUT
from tests.ui.history.unserved import UnservedPage

GRADIO_WARNINGS = ["'future.no_silent_downcasting' is deprecated", "The copy keyword is deprecated"]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm may be as small as Docker's 64 MB
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MISSING = "the browser tests need Chromium and playwright: apt-get install chromium; pip install playwright"


@pytest.fixture(scope="module", autouse=True)
def _small_models(as_bundled) -> None:
    """Open the page with small models."""


@pytest.fixture(scope="module")
def files_dir(tmp_path_factory) -> Iterator[Path]:
    """A folder of single files, small.safetensors (SD 1) and deep/my XL ü.SFT. The configs are theirs, not SD's."""
    root, configs = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("configs")
    (root / "deep").mkdir()
    for kind, name in (("sd1", "small.safetensors"), ("sdxl", "deep/my XL ü.SFT")):
        saved = ldm.save_pipeline(kind, tmp_path_factory.mktemp(kind))
        shutil.move(saved.file, root / name)
        (configs / kind).symlink_to(saved.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "CONFIGS", configs)
        yield root


@pytest.fixture(scope="session")
def shared(models_dir) -> Shared:
    """Models and a queue for all tests of a process, so each model is loaded once."""
    return Shared(Models(models_dir, device="cpu", styles=Styles([Style("wet", "{prompt} of the astronaut", "photo")])))


@pytest.fixture(scope="session")
def catalogue(shared) -> Catalogue:
    return shared.catalogue


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """Serve a page on a free port while the block runs. Only one page at a time in a process."""

    @contextmanager
    def serving_page(shared: Shared, limits: Limits, **options) -> Iterator[str]:
        context = serving(shared, limits, port=0, **{"outputs": tmp_path_factory.mktemp("outputs")} | options)

        async def enter() -> str:  # without an event loop, Gradio creates four and closes none
            return context.__enter__()[0]

        try:
            yield asyncio.run(enter()).rstrip("/")
        finally:
            context.__exit__(None, None, None)

    return serving_page


@pytest.fixture(scope="module")
def server(shared, serve) -> Iterator[str]:
    """The address of a page that this module's tests share. Each visit is a different user."""
    with serve(shared, Limits(), allow_hosts=["page.example.org"]) as address:
        yield address


@pytest.fixture
def bundle_example(tmp_path, monkeypatch):
    """Bundle a copy of a model folder before all others, with one example: a PNG with the settings `record`."""

    def bundle(name: str, folder: Path, **record) -> None:
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "examples").mkdir()
        settings = PngInfo()
        settings.add_itxt("fastdiff", json.dumps({"schema": 1, **record}))
        Image.new("RGB", (16, 16)).save(tmp_path / name / "examples" / "1.png", pnginfo=settings)
        bundled = {name: tmp_path / name, **hub.bundled_models()}
        monkeypatch.setattr(hub, "bundled_models", lambda: bundled)

    return bundle


@pytest.fixture
def upload_folder(tmp_path, monkeypatch) -> Path:
    """Gradio's folder for files, for code that runs without a server."""
    folder = tmp_path / "gradio"
    folder.mkdir()
    monkeypatch.setitem(os.environ, "GRADIO_TEMP_DIR", str(folder))
    return folder


_built = functools.cache(lambda models_dir: UnservedPage(Path("unused"), models_dir))


@pytest.fixture
def unserved_page(tmp_path, upload_folder) -> Callable[..., UnservedPage]:
    """Return a function that opens a new session of a page without a server. A process builds each page once."""

    def open_session(models_dir: Path | None = None, outputs: Path = tmp_path / "outputs") -> UnservedPage:
        page = _built(models_dir)
        page.visit(outputs)
        return page

    return open_session


class Visit:
    """A browser tab as the server sees it. Sends the requests of Gradio's page, without the page."""

    def __init__(self, address: str, login: tuple[str, str] | None = None):
        self.http = httpx.Client(base_url=address, timeout=60)
        if login:
            self.http.post("/login", data=dict(zip(("username", "password"), login, strict=True))).raise_for_status()
        self.session_hash = secrets.token_hex(8)
        self.config = self.http.get("/config").json()
        self.components = {each["id"]: each for each in self.config["components"]}

    def event(self, elem_id: str, name: str) -> dict:
        """Return the event `name` of the component `elem_id` that the server handles."""
        ids = {key for key, each in self.components.items() if each["props"].get("elem_id") == elem_id}
        return next(
            each
            for each in self.config["dependencies"]
            if each["backend_fn"] and any(target in ids and event == name for target, event in each["targets"])
        )

    def look(self) -> str:
        """Look at the queue as the page does, and return what has changed."""
        event = next(each for each in self.config["dependencies"] if each["api_name"] == "watch")
        return str(self.call(event, self.inputs(event))["output"]["data"])

    def draw(self, **values) -> str:
        """Press Generate with the given values, and return what the page shows until the run has ended."""
        event = self.event("generate", "click")
        shown = str(self.call(event, self.inputs(event, **values))["output"]["data"])
        deadline = time.monotonic() + 60
        while "Drew " not in shown and "alert" not in shown:
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.05)
            shown += self.look()
        return shown

    def inputs(self, event: dict, **values) -> list:
        """Return the initial values of the event's inputs, except for those given by label."""
        props = [self.components[each]["props"] for each in event["inputs"]]
        return [values.get(each.get("label"), each.get("value")) for each in props]

    def restore(self, file: dict) -> dict:
        """Drop an uploaded file onto the page's upload field, and return the last message."""
        event = self.event("upload", "upload")
        (label,) = {
            each["props"]["label"] for each in self.components.values() if each["props"].get("elem_id") == "upload"
        }
        return self.call(event, self.inputs(event, **{label: file}))

    def join(self, event: dict, data: list) -> httpx.Response:
        body = {"data": data, "fn_index": event["id"], "session_hash": self.session_hash}
        return self.http.post("/gradio_api/queue/join", json=body)

    def messages(self) -> Iterator[dict]:
        """Yield the server's messages about the events of this visit, until all have ended."""
        with self.http.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.session_hash}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    def call(self, event: dict, data: list) -> dict:
        """Run an event to its end, and return the last message."""
        assert self.join(event, data).status_code == 200
        return next(each for each in self.messages() if each["msg"] == "process_completed")


@pytest.fixture
def visit_at() -> Iterator[Callable[..., Visit]]:
    """Return a function that opens visits to a server, with a user and password if it asks for them."""
    with ExitStack() as stack:

        def open_visit(address: str, login: tuple[str, str] | None = None) -> Visit:
            each = Visit(address, login)
            stack.callback(each.http.close)
            return each

        yield open_visit


@pytest.fixture
def visit(server, visit_at) -> Callable[[], Visit]:
    """Return a function that opens visits to the module's server."""
    return lambda: visit_at(server)


class Ended(list[float]):
    """The times at which steps ended. Each step takes `seconds` longer, or ends as soon as `turns` are released."""

    seconds = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(0)


@pytest.fixture
def slow_steps(monkeypatch) -> Iterator[Ended]:
    """Make each step take 0.2 s longer, and tell the page of each."""
    monkeypatch.setattr("fastdiff.ui.drawing.INTERVAL", 0)
    monkeypatch.setattr("fastdiff.ui.progress.PREVIEW_INTERVAL", 0)
    ended = Ended()
    draw = drawing.draw

    def slowly(run, pipe):
        for each in draw(run, pipe):
            ended.turns.acquire(timeout=ended.seconds)
            ended.append(time.monotonic())
            yield each

    monkeypatch.setattr(drawing, "draw", slowly)
    yield ended
    ended.seconds = 0
    ended.turns.release(1000)  # a run that still waits would hold up the next test


@pytest.fixture
def one_place(shared, monkeypatch) -> None:
    """Draw one run at a time."""
    monkeypatch.setattr(shared.queue, "places", 1)


@pytest.fixture(scope="module")
def browser(server):  # playwright leaves an event loop running in this thread, and Gradio cannot start in it
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        executable = None
    if executable is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(MISSING)
    expect.set_options(timeout=TIMEOUT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server) -> Iterator[Callable]:
    """Return a function that opens visits, each with its own cookies. A visit may not call other hosts."""
    contexts, foreign = [], []

    def watch(request) -> None:
        if not request.url.startswith((server, "data:", "blob:")):
            foreign.append(request.url)

    def visit(size=DESKTOP, theme: str = "light"):
        contexts.append(browser.new_context(viewport=size, accept_downloads=True))
        contexts[-1].set_default_timeout(TIMEOUT)
        page = contexts[-1].new_page()
        page.on("request", watch)
        with page.expect_response("**/gradio_api/run/predict*"):  # the page's first request; input before it is lost
            page.goto(f"{server}/?__theme={theme}")
        page.get_by_role("button", name="Generate").wait_for()
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not foreign


@pytest.fixture
def page(open_page):
    return open_page()


def pytest_collection_modifyitems(items):
    """Filter Gradio's own warnings in tests that serve the page."""
    for item in items:
        if {"server", "components"} & set(getattr(item, "fixturenames", ())):
            for warning in GRADIO_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))

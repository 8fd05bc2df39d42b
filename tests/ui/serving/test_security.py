"""Attacks on the server: other users' files, links, cross-site requests, full disks, a flooded queue."""

import errno
import os
import re
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest
from gradio.route_utils import GradioUploadFile

from fastdiff.ui.parts.request import Limits
from tests.support.waiting import wait_for

LIMITS = Limits(waiting=4, waiting_of_one=2, upload=100_000, uploads=400_000)
opened: list[tuple] | None = None  # records the requested connections while it is a list


def _audit(event: str, arguments: tuple) -> None:
    if opened is not None and event in ("socket.connect", "socket.getaddrinfo"):
        opened.append(arguments)


sys.addaudithook(_audit)


@pytest.fixture(scope="module")
def server(shared, serve):
    with serve(shared, LIMITS, allow_hosts=["page.example.org"]) as address:
        yield address


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


def folder() -> Path:
    return Path(os.environ["GRADIO_TEMP_DIR"])


def send(http: httpx.Client, data: bytes = b"x", name: str = "a.png", **headers: str) -> httpx.Response:
    return http.post("/gradio_api/upload", files={"files": (name, data)}, headers=headers)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../../../../etc/passwd",
        "..%2f..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "file:///etc/passwd",
        "//etc/passwd",
        "%2Fetc%2Fpasswd",
        "pyproject.toml",
        f"{os.getcwd()}/pyproject.toml",
        "/proc/self/environ",
    ],
)
def test_files_of_the_machine_are_not_served(http, path):
    reply = http.get(f"/gradio_api/file={path}")
    assert reply.status_code in (403, 404)
    assert b"root:" not in reply.content and b"[project]" not in reply.content


@pytest.mark.parametrize("where", ["/gradio_api/file=http://127.0.0.1:9/x", "/gradio_api/proxy=http://127.0.0.1:9/x"])
def test_the_server_fetches_nothing_for_others(http, where):
    assert http.get(where, follow_redirects=False).status_code >= 300


@pytest.mark.parametrize("link", ["http://example.com/x.png", "HTTPS://example.com/x.png", "ftp://example.com/x.png"])
def test_the_server_looks_no_site_up_for_others(http, link):
    global opened
    opened = []
    try:
        reply = http.get(f"/gradio_api/file={link}", follow_redirects=False)
    finally:
        asked, opened = opened, None
    assert (reply.status_code, reply.text) == (403, "this server does not fetch links")
    assert not [arguments for arguments in asked if "example.com" in str(arguments)]


def test_the_folder_of_pictures_is_private(server):
    assert folder().stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/etc/passwd", id="file of the machine"),
        pytest.param(f"{os.getcwd()}/pyproject.toml", id="file of the working directory"),
        pytest.param("http://127.0.0.1:{port}/a.png", id="loopback"),
        pytest.param("http://169.254.169.254/a.png", id="cloud metadata"),
        pytest.param("http://100.100.100.200/a.png", id="shared address space"),
        pytest.param("HTTPS://example.com/a.png", id="name in the DNS"),
        pytest.param("ftp://example.com/a.png", id="another protocol"),
    ],
)
def test_an_upload_by_path_or_link_reads_nothing(visit, path):
    global opened
    page = visit()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        path = path.format(port=listener.getsockname()[1])
        opened = []
        try:
            file = {"path": path, "meta": {"_type": "gradio.FileData"}}
            result = page.restore(file)
        finally:
            asked, opened = opened, None
    assert not result["success"] or "upload: " in str(result["output"]["data"])
    assert "root:" not in str(result)
    server_address = (page.http.base_url.host, page.http.base_url.port)
    assert [arguments for arguments in asked if arguments[1] != server_address and arguments[0] != "127.0.0.1"] == []


def test_a_link_in_the_place_of_a_label_reads_nothing(http):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        link = {"path": f"http://127.0.0.1:{listener.getsockname()[1]}/a.png", "meta": {"_type": "gradio.FileData"}}
        for label in (link, [link], {"deep": [link]}):
            call = http.post("/gradio_api/call/generate", json={"data": ["emoji64", label, 0, 1, 1, *[None] * 9]})
            result = http.get(f"/gradio_api/call/generate/{call.json()['event_id']}").text
            assert "label: a file is not allowed here" in result
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_full_disk_says_so_and_keeps_no_half_of_a_file(http, monkeypatch):
    write = GradioUploadFile.write

    async def fill(self, data: bytes) -> None:
        await write(self, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(folder().rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(GradioUploadFile, "write", fill)
        reply = send(http)
    assert (reply.status_code, reply.text) == (507, "the server's disk is full; free some space, then try again")
    assert set(folder().rglob("*")) == before
    assert send(http).status_code == 200


def test_an_upload_is_refused_by_its_signature_and_not_kept(visit):
    page = visit()
    (path,) = send(page.http, b"GIF89a picture", "photo.png").json()
    assert Path(path).is_file()
    file = {"path": path, "orig_name": "photo.png", "meta": {"_type": "gradio.FileData"}}
    result = page.restore(file)
    assert "photo.png is not a PNG, JPEG or WebP file" in str(result["output"]["data"])
    assert not Path(path).exists()


def test_a_body_over_the_limit(http):
    assert send(http, bytes(LIMITS.upload - 500)).status_code == 200
    assert send(http, bytes(LIMITS.upload)).status_code == 413
    assert http.post("/gradio_api/queue/join", content=b" " * (LIMITS.upload + 1)).status_code == 413


def test_a_body_of_unknown_length(http):
    reply = http.post("/gradio_api/upload", content=iter([b"x"]), headers={"content-type": "multipart/form-data"})
    assert reply.status_code == 411


def test_pictures_of_programs_are_no_uploads(http):
    pictures = folder() / "pictures" / "a"
    pictures.mkdir(parents=True, exist_ok=True)
    (pictures / "a.png").write_bytes(bytes(LIMITS.uploads))
    assert send(http).status_code == 200
    (pictures / "a.png").unlink()


def test_many_small_uploads_do_not_fill_the_disk(http):
    statuses = [send(http, os.urandom(4000)).status_code for _ in range(200)]
    assert {200, 413} == set(statuses)
    assert sum(path.stat().st_size for path in folder().rglob("*") if path.is_file()) <= LIMITS.uploads


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://", ""])
def test_another_site_is_refused(http, origin):
    assert send(http, Origin=origin).status_code == 403
    body = {"data": [], "fn_index": 0, "session_hash": "x"}
    assert http.post("/gradio_api/queue/join", json=body, headers={"Origin": origin}).status_code == 403
    assert http.post("/gradio_api/call/models", json={"data": []}, headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize("path", ["/", "/config", "/gradio_api/info", "/gradio_api/queue/data?session_hash=x"])
def test_a_name_that_was_rebound_reads_nothing(http, path):
    """DNS rebinding: another site points its name here after a browser has opened it."""
    reply = http.get(path, headers={"Host": f"evil.example:{http.base_url.port}"})
    assert reply.status_code == 403
    assert reply.text == "host name evil.example is not allowed; to allow it, restart the server with --allow-host"


def test_a_name_that_was_rebound_draws_nothing(http):
    site = f"evil.example:{http.base_url.port}"
    headers = {"Host": site, "Origin": f"http://{site}"}
    assert http.post("/gradio_api/call/models", json={"data": []}, headers=headers).status_code == 403


def test_the_page_itself_and_programs_are_let_in(http, server):
    for headers in ({"Origin": server}, {}):
        reply = http.post("/gradio_api/call/models", json={"data": []}, headers=headers)
        assert reply.status_code == 200


@pytest.mark.usefixtures("one_place")
def test_a_user_who_queues_without_end_is_refused_and_another_draws_next(visit, shared, slow_steps):
    slow_steps.seconds = 60
    flood, other = visit(), visit()
    event = flood.event("generate", "click")
    replies = [str(flood.call(event, flood.inputs(event, Steps=1))["output"]["data"]) for _ in range(5)]
    assert ["wait already" in reply for reply in replies[:2]] == [False, False] and "wait already" in replies[-1]
    assert "wait already" not in str(other.call(event, other.inputs(event, Steps=1, Seed=22)))
    assert "Waiting for 1 run before it" in other.look()
    slow_steps.seconds = 0
    slow_steps.turns.release(10)
    wait_for(lambda: "Drew 1 picture" in other.look())
    wait_for(lambda: not shared.queue.is_drawing)


def test_a_user_neither_watches_nor_cancels_the_run_of_another(visit, shared, slow_steps):
    slow_steps.seconds = 60
    owner, spy = visit(), visit()
    event = owner.event("generate", "click")
    owner.call(event, owner.inputs(event, Steps=1, Seed=11))
    name = re.search(r'data-run="(\w+)"', owner.look())[1]
    assert name not in spy.look()
    cancel = spy.event("generate-runs", "click")
    body = {"data": spy.inputs(cancel), "fn_index": cancel["id"], "session_hash": spy.session_hash}
    spy.http.post("/gradio_api/queue/join", json=body | {"event_data": {"run": name}}).raise_for_status()
    assert name not in str(next(each for each in spy.messages() if each["msg"] == "process_completed"))
    slow_steps.turns.release(2)
    wait_for(lambda: "Drew 1 picture" in owner.look())
    assert "Drew" not in spy.look()


def test_a_run_goes_on_without_its_page_and_another_page_of_the_user_shows_it(visit, slow_steps):
    page = visit()
    event = page.event("generate", "click")
    page.call(event, page.inputs(event, Pictures=2, Steps=2, Seed=31))
    page.session_hash = "another"  # as after a reload
    assert "data-run" in page.look()
    wait_for(lambda: "Drew 2 pictures" in page.look())
    assert len(slow_steps) == 4 or len(slow_steps) == 2


def test_cancel_answers_at_once_keeps_pictures_and_the_next_run_is_right(visit, shared, slow_steps):
    slow_steps.seconds = 60
    page = visit()
    event = page.event("generate", "click")
    page.call(event, page.inputs(event, Steps=3))
    wait_for(lambda: shared.queue.is_drawing)
    name = re.search(r'data-run="(\w+)"', page.look())[1]
    cancel = page.event("generate-runs", "click")
    body = {"data": page.inputs(cancel), "fn_index": cancel["id"], "session_hash": page.session_hash}
    start = time.monotonic()
    page.http.post("/gradio_api/run/predict", json=body | {"event_data": {"run": name}}).raise_for_status()
    assert time.monotonic() - start < 0.5 and not slow_steps
    assert "Cancelled" in page.look()
    slow_steps.turns.release(20)
    assert "Drew 1 picture" in page.draw(Steps=2)
    assert len(slow_steps) <= 1 + 2


def test_a_visit_sees_its_own_pictures_only(visit):
    pages = [visit(), visit()]
    for page, seed in zip(pages, (11, 22), strict=True):
        assert "Drew 1 picture" in page.draw(Steps=1, Seed=seed)
    opened = pages[0].event("history-tab", "select")
    for page, own, other in zip(pages, ("seed 11", "seed 22"), ("seed 22", "seed 11"), strict=True):
        history = str(page.call(opened, [None, 1])["output"]["data"])
        assert own in history and other not in history


def test_pictures_of_the_api_have_names_that_nobody_can_guess(http):
    call = http.post("/gradio_api/call/generate", json={"data": ["emoji64", None, 0, 1, 1, *[None] * 9]}).json()
    assert "event: complete" in http.get(f"/gradio_api/call/generate/{call['event_id']}").text
    pictures = list((folder() / "pictures").rglob("*.png"))
    assert pictures
    for picture in pictures:
        (run_folder,) = picture.relative_to(folder() / "pictures").parts[:-1]
        assert len(run_folder) >= 11
    assert http.get(f"/gradio_api/file={folder()}/pictures").status_code in (403, 404)

"""`fastdiff ui` as a process: it stops in time, whatever is open or running."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from fastdiff.execution import temporaries
from fastdiff.requests import png
from fastdiff.ui.parts.request import Limits

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")]
ROOT = Path(__file__).parents[2]
SECONDS = 30  # to stop, even if a step takes minutes


@contextmanager
def process(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start a server in `folder`, with its temporary files in a folder there. Yields it and its address."""
    (folder / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "app.py", "--device", "cpu", "--port", "0", *flags]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            yield server, server.stdout.readline().split()[3].rstrip("/,")
        finally:
            server.kill()


def listen(page, path: str) -> None:
    """Read a stream in a thread until the server ends it."""

    def read() -> None:
        with suppress(httpx.HTTPError), page.http.stream("GET", path) as stream:
            list(stream.iter_lines())

    threading.Thread(target=read, daemon=True).start()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "kill"])
def test_it_ends_in_the_midst_of_a_step_with_a_page_and_a_stream_open(sign, tmp_path, visit_at):
    with process(tmp_path) as (server, address):
        page = visit_at(address)
        listen(page, f"/gradio_api/heartbeat/{page.session_hash}")
        event = page.event("generate", "click")
        assert "Drew 2 pictures" in page.draw(Pictures=2, Steps=1, Seed=0)
        many = {"Pictures": 32, "Batch size": 32, "Width": 1024, "Height": 1024, "Steps": 2}
        assert page.call(event, page.inputs(event, **many))["success"]
        time.sleep(2)
        start = time.monotonic()
        server.send_signal(sign)
        assert server.wait(60) == 130
        assert time.monotonic() - start < SECONDS
        assert server.stderr.read() == "fastdiff: interrupted\n"
    assert not list(tmp_path.rglob("fastdiff-ui-*")) and not list(tmp_path.rglob("*.tmp"))
    kept = list(tmp_path.rglob("*.png"))
    assert sorted(png.read_settings(path)["seed"] for path in kept) == [0, 1]
    assert all(path.is_relative_to(tmp_path / "outputs") for path in kept)


def test_beyond_this_machine_the_addresses_are_real_and_it_says_what_that_means(tmp_path):
    with process(tmp_path, "--host", "0.0.0.0", "--no-auth") as (server, address):
        assert "everybody who can reach one of these addresses can use" in server.stderr.readline()
        assert "0.0.0.0" not in address and httpx.get(f"{address}/config").status_code == 200


LIVE = """
from fastdiff.ui.serving.temporary import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    input()
"""  # as another server does with its folder


def test_what_a_killed_server_left_goes_when_another_starts_and_a_living_ones_stays(
    shared, serve, tmp_path, monkeypatch
):
    with process(tmp_path) as (killed, _):
        killed.kill()
        killed.wait()
    folder = tmp_path / "tmp"
    (left,) = folder.glob("fastdiff-ui-*")
    run = tmp_path / "outputs" / "2001-02-03" / "101112-abcd"
    run.mkdir(parents=True)
    temporaries._create(run).close()
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LIVE], env=environment, **pipes) as living:
        living_folder = Path(living.stdout.readline().strip())
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with serve(shared, Limits(), outputs=tmp_path / "outputs"):
            folders = list(folder.glob("fastdiff-ui-*"))
            assert left not in folders and living_folder in folders and len(folders) == 2
            assert not run.exists()
        living.communicate("\n")

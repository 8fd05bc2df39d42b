"""The end of a worker that is told to stop, wherever it is, and of one whose launcher is gone."""

import subprocess
import sys
import time

import pytest

CODE = """
import sys, time
from fastdiff.bulk import stopping
stopping.LAST, stopping._LOOK = 0.3, 0.05
stop = stopping.Stop()
stop.cleanup = lambda: print("given back", flush=True)
stop.install()
print("ready", flush=True)
{body}
"""


def start(body: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", CODE.format(body=body)], stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_process_that_does_not_come_to_an_end_is_ended():
    with start("time.sleep(60)") as process:
        process.stdout.readline()
        process.terminate()
        assert process.communicate(timeout=30)[0] == "given back\n" and process.returncode == 143


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_one_whose_parent_is_gone_stops(tmp_path):
    body = "open(sys.argv[1], 'w').write('ready'); stop.wait(60) and open(sys.argv[1], 'a').write(' and asked')"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CODE.format(body=body)!r}, sys.argv[1]])"
    code += "; import time; time.sleep(60)"
    path = tmp_path / "said"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.DEVNULL) as parent:
        wait_for(lambda: path.exists() and path.read_text())
        parent.kill()
    wait_for(lambda: path.read_text() == "ready and asked")


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

"""The end of a worker that is told to stop, at any moment, and of a worker whose launcher is gone."""

import signal
import subprocess
import sys

import pytest

from fastdiff.bulk import stopping
from tests.support.waiting import TIMEOUT, wait_for

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
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_process_that_does_not_come_to_an_end_is_ended(name, code):
    with start("time.sleep(600)") as process:
        process.stdout.readline()
        process.send_signal(getattr(signal, name))
        assert process.communicate(timeout=TIMEOUT)[0] == "given back\n" and process.returncode == code


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_under_nohup_the_terminals_end_stops_nothing(monkeypatch):
    assert signal.SIGHUP in stopping.end_signals()
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if number == signal.SIGHUP else None)
    assert stopping.end_signals() == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_one_whose_parent_is_gone_stops(tmp_path):
    body = "open(sys.argv[1], 'w').write('ready'); stop.wait(600) and open(sys.argv[1], 'a').write(' and asked')"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CODE.format(body=body)!r}, sys.argv[1]])"
    code += "; import time; time.sleep(600)"
    path = tmp_path / "said"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.DEVNULL) as parent:
        wait_for(lambda: path.exists() and path.read_text())
        parent.kill()
    wait_for(lambda: path.read_text() == "ready and asked")

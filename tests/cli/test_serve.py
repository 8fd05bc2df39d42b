"""`fastdiff serve`: its arguments, and its end by a signal."""

import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from fastdiff import cli
from fastdiff.diffusion.shared_steps import Company
from fastdiff.errors import DeviceLostError
from fastdiff.serve.keys import VARIABLE
from tests.support.waiting import TIMEOUT


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--host", "0.0.0.0"], "give --keys FILE"),
        (["--host", "203.0.113.1", "--keys", "{keys}"], "not an address of this machine"),
        (["--model", "emoji64"], "draws from no prompts"),
        (["--model", "emoji-sd", "--model", "emoji-sd"], "another model has the id emoji-sd"),
        (["--model", "no-such"], "no-such"),
        (["--lora-dir", "no-such"], "not a folder"),
        (["--max-batch", "0"], "at least 1"),
        (["--timeout", "nan"], "not a number of seconds"),
        (["--drain", "-1"], "not a number of seconds"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.delenv(VARIABLE, raising=False)
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    assert cli.main(["serve", "--device", "cpu", *(each.format(keys=keys) for each in flags)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_port_in_use_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--device", "cpu", "--port", str(port)]) == 1
    assert f"port {port} at 127.0.0.1 is not free" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, said", [(DeviceLostError("the GPU failed"), "the GPU failed"), (MemoryError(), "out of memory")]
)
def test_a_server_without_its_device_or_its_models_ends(monkeypatch, capsys, error, said):
    def fail(*_):
        raise error

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Company, "take", fail)
    assert cli.main(["serve", "--device", "cpu", "--port", "0"]) == 1
    assert said in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_at_once_and_ends_by_a_signal(number, code):
    command = [sys.executable, "-m", "fastdiff", "serve", "--device", "cpu", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            address = re.search(r"http://[\d.:]+", process.stdout.readline())[0]
            body = {"prompt": "red fox", "num_inference_steps": 1, "size": "32x32"}
            answer = httpx.post(f"{address}/v1/images/generations", json=body, timeout=TIMEOUT)
            assert answer.status_code == 200 and answer.json()["size"] == "32x32"
            process.send_signal(number)
            _, said = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert process.returncode == code, said
    assert "Traceback" not in said

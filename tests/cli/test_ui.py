"""`fastdiff ui` and `python app.py`: refused flags, and no files left behind."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from fastdiff.cli import main
from tests.checkpoints.single_files import headers
from tests.support.waiting import TIMEOUT

ROOT = Path(__file__).parents[2]


def test_without_gradio(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["ui"]) == 2
    assert "ui needs gradio, which is not installed; pip install 'fastdiff[ui]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(
            ["--models-dir", "missing"],
            "--models-dir: missing is not a folder; give the folder that contains your models",
            id="models folder",
        ),
        pytest.param(["--preview-vae", "."], "--preview-vae: ", id="preview VAE"),
        pytest.param(
            ["--styles", "no.csv"], "styles no.csv does not exist; give a CSV file with the columns", id="styles"
        ),
        pytest.param(["--device", "cuda:99"], "device: cuda:99 does not exist", id="device"),
        pytest.param(["--port", "x"], "argument --port", id="port"),
        pytest.param(["--port", "-1"], "-1 is not a port; give one from 1 to 65535, or 0 for a free one", id="-1"),
        pytest.param(["--port", "99999"], "99999 is not a port; give one from 1 to 65535", id="99999"),
        pytest.param(["--host", "0.0.0.0"], "--host 0.0.0.0 lets others draw on this machine; give --auth", id="open"),
        pytest.param(["--max-minutes", "0"], "0 is not a positive number of minutes", id="no minutes"),
        pytest.param(["--max-minutes", "nan"], "nan is not a positive number of minutes", id="nan minutes"),
        pytest.param(["--allow-host", "draw.org"], "--allow-host lets others draw on this machine", id="by name"),
        pytest.param(["--share"], "--share lets others draw on this machine; give --auth", id="share"),
        pytest.param(["--auth", "missing"], "--auth missing cannot be read", id="auth"),
        pytest.param(["--auth", "missing", "--no-auth"], "not allowed with argument", id="auth and none"),
        pytest.param(["--allow-host", "https://a.org"], "https://a.org is not a host name such as", id="allowed host"),
    ],
)
def test_refusals(flags, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["ui", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def app(*flags: str) -> list:
    return [sys.executable, ROOT / "app.py", "--device", "cpu", *flags]


def test_models_that_are_left_out_are_named_and_so_is_a_port_in_use(here, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model_index.json").write_text("{")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = here("ui", "--device", "cpu", "--port", port, "--models-dir", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert re.match(r"fastdiff: model \./gone is not offered: .*No such file", lines[0])
    assert re.match(r"fastdiff: model \./broken is not offered: .*model_index.json is not readable JSON", lines[1])
    assert lines[2:] == [f"fastdiff: error: no free port at 127.0.0.1 (tried {port}); choose another --port or --host"]


def test_of_many_models_that_are_left_out_some_are_named(here, tmp_path, monkeypatch):
    """The folder comes from the environment, as for `fastdiff models`."""
    for number in range(12):
        headers.write(tmp_path / f"{number:02}.safetensors", {"lora_unet_mid_block.lora_up.weight": (2, 2)})
    monkeypatch.setenv("FASTDIFF_MODELS", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = here("ui", "--device", "cpu", "--port", taken.getsockname()[1])
    *lines, others, _ = done.stderr.splitlines()
    assert [line.partition(": ./")[0] for line in lines] == [
        f"fastdiff: model ./{number:02}.safetensors is not offered" for number in range(10)
    ]
    assert others == f"fastdiff: 2 more models are not offered; fastdiff models --models-dir {tmp_path} lists them"


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "kill"])
def test_app_serves_on_loopback_until_it_is_ended(sign, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        app("--port", str(port)), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        line = process.stdout.readline()
        assert re.fullmatch(rf"fastdiff is at http://127\.0\.0\.1:{port}/ .*\n", line)
        assert "fastdiff" in httpx.get(f"http://127.0.0.1:{port}/").text
        assert [path for path in tmp_path.iterdir() if path.name.startswith("fastdiff-ui-")]
        process.send_signal(sign)
        assert process.wait(TIMEOUT) == 130
        assert "Traceback" not in process.stderr.read()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("fastdiff-ui-")]

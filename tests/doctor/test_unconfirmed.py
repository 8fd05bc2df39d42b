"""An unconfirmed Triton: every command says so in one line. A verdict is recorded wherever it affects bits."""

import contextlib
import logging
import re

import pytest

import fastdiff
from fastdiff import cli
from fastdiff.bulk.fingerprint import differences, digest, take_fingerprint
from fastdiff.bulk.stopping import Stop
from fastdiff.requests import png
from tests.support.tiny import UNET, save_unet

LINE = (
    "the fast kernels are off: nobody has confirmed them in Triton 77.1.0; "
    "`fastdiff doctor --check-kernels` tries them on this machine"
)
SMALL = UNET | {"block_out_channels": (8,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The folder of an unlabelled 8 x 8 U-Net."""
    return str(save_unet(tmp_path_factory.mktemp("models") / "tiny", **SMALL))


@pytest.fixture
def sample(model, tmp_path, monkeypatch, capsys):
    """Run `fastdiff sample` and return its stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> str:
        code = cli.main(["sample", "-m", model, "--steps", "1", "--num-images", "2", "-b", "1", "-o", "out", *args])
        said = capsys.readouterr().err
        assert code == 0, said
        return said

    return run


@pytest.fixture(scope="module")
def pipe(model):
    return fastdiff.Pipeline.from_pretrained(model, device="cpu")


def test_sample_says_it_once(sample, unknown_triton, write_verdict):
    assert sample().count(LINE) == 1
    write_verdict()
    assert "fast kernels" not in sample("--overwrite")


def test_nothing_is_said_elsewhere(sample, pipe):
    assert "fast kernels" not in sample()
    assert fastdiff.report(pipe).notice == "" and "fast kernels" not in str(fastdiff.report(pipe))


def test_a_report_has_it_as_a_line(pipe, unknown_triton):
    found = fastdiff.report(pipe)
    assert str(found).splitlines().count(LINE) == 1 and found.as_dict()["notice"] == LINE


def bulk(model: str, monkeypatch, capsys, rank: int) -> str:
    """Run `fastdiff bulk` as a torchrun worker and return its stderr."""
    monkeypatch.setattr(Stop, "install", lambda self: None)
    monkeypatch.setattr(logging.getLogger("fastdiff"), "setLevel", lambda level: None)
    place = {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": rank, "RANK": rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    asked = ["-m", model, "--steps", "1", "--num-images", "1", "--device", "cpu", "--out", f"bulk-{rank}"]
    assert cli.main(["bulk", *asked]) == 0
    return capsys.readouterr().err


@pytest.mark.usefixtures("one_thread", "unknown_triton")
def test_the_first_worker_of_bulk_says_it(model, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert bulk(model, monkeypatch, capsys, 0).count(LINE) == 1
    assert LINE not in bulk(model, monkeypatch, capsys, 1)


@pytest.mark.usefixtures("unknown_triton")
def test_the_page_says_it(monkeypatch, tmp_path, capsys):
    pytest.importorskip("gradio", reason="no gradio here")
    from fastdiff.cli import ui
    from fastdiff.ui import server
    from fastdiff.ui.shared import Shared

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "serving", lambda *args, **options: contextlib.nullcontext(object()))
    monkeypatch.setattr(ui.access, "addresses", lambda *args: ["http://there"])
    monkeypatch.setattr(ui.signal, "signal", lambda *args: None)
    monkeypatch.setattr(ui.CTRL_C, "wait", lambda: None)
    monkeypatch.setattr(Shared, "warm_up", lambda self, name: None)
    assert cli.main(["ui", "--device", "cpu"]) == 0
    assert capsys.readouterr().err.count(LINE) == 1


def test_the_fingerprint_of_bulk_has_the_verdict_that_decides(pipe, unknown_triton, write_verdict, monkeypatch):
    before = take_fingerprint(pipe, "0" * 64)
    assert before.get("fast kernels") is None and "fast kernels" not in before
    made = write_verdict("linear 640 to 640")
    with_verdict = take_fingerprint(pipe, "0" * 64)
    assert with_verdict == {**before, "fast kernels": made.digest} and digest(with_verdict) != digest(before)
    assert differences(with_verdict, before) == [f"fast kernels {made.digest}, not none"]
    monkeypatch.setattr("fastdiff.kernels.plans.confirmation.VERSIONS", ((77, 1),))
    assert take_fingerprint(pipe, "0" * 64) == before, "a folder that was started earlier can continue"


def test_a_picture_tells_the_verdict_and_nothing_compares_it(sample, write_verdict, unknown_triton, tmp_path):
    made = write_verdict()
    sample("-s", "1")
    first, second = sorted((tmp_path / "out").glob("*.png"))
    assert png.read_settings(first)["versions"]["fast kernels"] == made.digest
    second.unlink()
    write_verdict("linear 640 to 640")
    assert "kept 1, wrote 1" in sample("-s", "1", "--resume")
    assert png.read_settings(second)["versions"]["fast kernels"] != made.digest
    assert re.search(r"wrote \d", sample("--from", str(first), "-o", "again"))

"""`fastdiff bench`: its table and its JSON document, its exit codes, and Ctrl-C."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from importlib import metadata

import pytest

from fastdiff import __version__, cli
from fastdiff.checkpoints import hub
from fastdiff.cli import bench
from fastdiff.verification import speed
from tests.checkpoints.single_files import headers, ldm
from tests.support.tiny import UNET, save_unet
from tests.support.waiting import TIMEOUT

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ["--device", "cpu", "--steps", "1", "--no-compile"]
NUMBER, INTEGER, TEXT, OPTIONAL_TEXT = (int, float), int, str, (str, type(None))
SCHEMA = {
    "format": INTEGER,
    "complete": bool,
    "model": TEXT,
    "class": TEXT,
    "weights_sha256": OPTIONAL_TEXT,
    "batch_size": INTEGER,
    "height": (int, type(None)),
    "width": (int, type(None)),
    "horizon": (int, type(None)),
    "dtype": TEXT,
    "precision": TEXT,
    "device": TEXT,
    "threads": INTEGER,
    "steps": (int, type(None)),
    "versions": dict,
    "machine": dict,
    "rows": list,
    "notes": list,
}
ROW = {
    "name": TEXT,
    "ms": NUMBER,
    "error": NUMBER,
    "first_result_s": NUMBER,
    "peak_bytes": type(None),
    "failure": type(None),
}
MACHINE = ["system", "cards", "driver", "cuda", "cudnn", "hip", "platform"]  # as in `fastdiff doctor --json`


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny model without labels."""
    return str(save_unet(tmp_path_factory.mktemp("bench") / "tiny", **UNET))


def assert_fits(found: dict, schema: dict) -> None:
    assert list(found) == list(schema)
    assert not [name for name, kind in schema.items() if not isinstance(found[name], kind)], found


def test_the_document_of_a_bundled_model(capsys):
    assert cli.main(["bench", "emoji64", *QUICK, "--json", "-"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert_fits(found, SCHEMA)
    for row in found["rows"]:
        assert_fits(row, ROW)
    assert [row["name"] for row in found["rows"]] == ["fastdiff", "diffusers"]
    assert found["rows"][0]["error"] < 1e-5
    weights = hub.bundled_models()["emoji64"] / "unet" / "diffusion_pytorch_model.safetensors"
    assert found["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    stated = {name: found[name] for name in ("format", "complete", "model", "class", "batch_size", "height", "width")}
    assert stated == {
        **{"format": 1, "complete": True, "model": "emoji64", "class": "UNet2DModel"},
        **{"batch_size": 1, "height": 64, "width": 64},
    }
    assert (found["dtype"], found["precision"], found["device"], found["steps"]) == ("float32", "full", "cpu", 1)
    assert list(found["versions"]) == ["fastdiff", "python", "torch", "triton", "diffusers"]
    assert found["versions"]["fastdiff"] == __version__
    assert found["versions"]["diffusers"] == metadata.version("diffusers")
    assert list(found["machine"]) == MACHINE


@pytest.mark.parametrize(
    "alone", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["checkpoint", "U-Net alone"]
)
def test_a_single_file_is_timed_like_its_folder(alone, tmp_path, capsys):
    """diffusers reads the same file."""
    _, pipe, folder, file = ldm.save_pipeline("sdxl", tmp_path)
    if alone:
        file = ldm.save(ldm.prefixed("model.diffusion_model.", ldm.ldm_unet(pipe.unet)), tmp_path / "unet.safetensors")
    found = {}
    for name, options in ((str(folder), []), (str(file), ["--config", str(folder)])):
        assert cli.main(["bench", name, *QUICK, *options, "--json", "-"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
        assert [row["failure"] for row in found[name]["rows"]] == [None, None]
        assert found[name]["rows"][0]["error"] < 1e-5
    same = ("class", "height", "width", "dtype")
    assert len({tuple(each[key] for key in same) for each in found.values()}) == 1
    assert found[str(file)]["weights_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["vae.safetensors"], "vae.safetensors holds no U-Net, only VAE; give a file that does"),
        (
            ["unet.safetensors"],
            "unet.safetensors is a U-Net of an unknown size; give the folder of its config as config",
        ),
        (["unet.safetensors", "--variant", "fp16"], "variant: 'fp16' is given for unet.safetensors, but a single file"),
        (["emoji64", "--config", "x"], "config: it is for single files, and emoji64 is none; leave it out"),
        (["none.safetensors"], "none.safetensors does not exist; give a safetensors file"),
    ],
)
def test_a_file_that_cannot_be_timed_is_one_line(options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    headers.write(tmp_path / "vae.safetensors", headers.VAE)
    headers.write(tmp_path / "unet.safetensors", headers.unet(64))
    assert cli.main(["bench", *options, *QUICK]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"fastdiff: error: {said}") and err.count("\n") == 1


def test_a_table_and_a_file(tiny, tmp_path, capsys):
    file = tmp_path / "new" / "bench.json"
    for batch in (2, 3):  # the second replaces the result of the first
        assert cli.main(["bench", tiny, *QUICK, "-b", str(batch), "--json", str(file)]) == 0
        what, how, header, ours, eager, legend = capsys.readouterr().out.splitlines()
        assert what == f"one forward of {tiny} (UNet2DModel), batch size {batch}, 8 x 8"
        assert how.startswith(f"float32, on cpu; fastdiff {__version__}, python ")
        assert header.split() == ["ms", "speed", "error", "first", "result", "peak", "memory"]
        found = json.loads(file.read_text())
        assert found["batch_size"] == batch
        times = [row["ms"] for row in found["rows"]]
        assert ours.split()[:3] == ["fastdiff", f"{times[0]:.2f}", f"{times[1] / times[0]:.2f}x"]
        assert eager.split()[:3] == ["diffusers", f"{times[1]:.2f}", "1.00x"]
        assert re.search(r" \d\.\de-0\d +\d+\.\d s +-$", ours) and legend == bench.LEGEND


def test_rows_of_a_card_and_of_a_failure():
    row = {"name": "fastdiff", "ms": 2.0, "error": 0.012, "first_result_s": 3.21, "peak_bytes": 2**29, "failure": None}
    assert bench._line(row, [row]).split() == ["fastdiff", "2.00", "-", "1.2e-02", "3.2", "s", "0.50", "GiB"]
    failed = row | {"name": "torch.compile", "failure": "no compiler"}
    assert bench._line(failed, [row, failed]).split() == ["torch.compile", "failed:", "no", "compiler"]


def test_without_diffusers_a_line_says_how_to_get_it(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert cli.main(["bench", tiny, *QUICK]) == 0
    *_, ours, note, legend = capsys.readouterr().out.splitlines()
    assert ours.startswith("fastdiff ") and legend == bench.LEGEND
    assert note == (
        "the comparison with diffusers needs diffusers, which is not installed; pip install 'fastdiff[diffusers]'"
    )


def test_where_fastdiff_has_no_memory_the_exit_code_is_1(tiny, monkeypatch, capsys):
    def fail(*args, **options):
        raise MemoryError

    monkeypatch.setattr("fastdiff.UNet2DModel.from_folder", fail)
    assert cli.main(["bench", tiny, *QUICK]) == 1
    out, said = capsys.readouterr()
    assert "failed: out of memory for batch size 1\ndiffusers" in out
    assert said == (
        "fastdiff: error: fastdiff was not measured: out of memory for batch size 1; "
        "lower --batch-size, --height or --width\n"
    )


def test_inputs_that_do_not_fit_in_memory_are_one_line(tiny, monkeypatch, capsys):
    def fail(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("fastdiff.verification.peers.noise", fail)
    assert cli.main(["bench", tiny, *QUICK]) == 1
    assert capsys.readouterr() == ("", "fastdiff: error: out of memory for batch size 1\n")


REFUSED = {
    "model": (["emoji65"], "no model 'emoji65'; did you mean emoji64?"),
    "batch-size": (["emoji64", "-b", "0"], "argument -b/--batch-size: 0 is not a whole number of at least 1"),
    "huge-batch": (["emoji64", "-b", "9" * 30], f"batch-size: {'9' * 30} is not a whole number from 1 to 50000"),
    "steps": (["emoji64", "--steps", "9" * 30], f"steps: {'9' * 30} is not a whole number from 1 to 100000"),
    "height": (["emoji64", "--height", "63"], "height 63, width 64: both must be multiples of 8"),
    "dtype": (["emoji64", "--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
    "device": (["emoji64", "--device", "tpu"], "argument --device: tpu is not auto, cpu, cuda or cuda:1"),
    "folder": (["emoji64", "--json", "."], ". is a folder; choose another file with --json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(name, capsys):
    argv, message = REFUSED[name]
    assert cli.main(["bench", *argv]) == 2
    out, said = capsys.readouterr()
    assert out == "" and said.startswith(f"fastdiff: error: {message}") and said.count("\n") == 1


@pytest.mark.parametrize("text", ["precious", "[]", "{}", '{"rows": []}'])
def test_a_file_of_something_else_is_kept(tmp_path, capsys, text):
    file = tmp_path / "file"
    file.write_text(text)
    assert cli.main(["bench", "emoji64", *QUICK, "--json", str(file)]) == 2
    assert "exists and is no result of bench; choose another file with --json" in capsys.readouterr().err
    assert file.read_text() == text


def test_a_lost_device_keeps_what_was_measured(tiny, monkeypatch, capsys):
    def lose(self, calls):
        raise RuntimeError("CUDA error: unspecified launch failure\nSee")

    monkeypatch.setattr(speed.Bench, "_in_turns", lose)
    assert cli.main(["bench", tiny, *QUICK]) == 1
    out, said = capsys.readouterr()
    assert out.count("\nfastdiff ") == out.count("\ndiffusers ") == 1
    assert "the GPU failed" in said and said.count("\n") == 1


# The command. Ctrl-C comes when the peers were called, and before their turns end.
INTERRUPTED = """if True:
    import os, signal, sys
    from fastdiff import cli
    from fastdiff.verification import speed
    def measure(calls, tell, **options):
        tell({name: 4.0 for name in calls})
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    speed.measure = measure
    sys.exit(cli.main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_ctrl_c_keeps_what_was_measured(tiny, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, "bench", tiny, *QUICK, "--json", "bench.json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "fastdiff: interrupted; the results so far are kept\n")
    assert [line.split()[:2] for line in done.stdout.splitlines()[3:5]] == [["fastdiff", "4.00"], ["diffusers", "4.00"]]
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["complete"] is False and [row["ms"] for row in found["rows"]] == [4.0, 4.0]

"""The command as a program: its script, and output without a reader."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastdiff import cli
from fastdiff.errors import DeviceLostError


def test_output_that_nobody_reads_ends_quietly(tmp_path, environment):
    with subprocess.Popen(
        [sys.executable, "-m", "fastdiff", "models", "emoji64"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (141, "")


def test_the_console_script_is_the_same_command(tmp_path):
    script = shutil.which("fastdiff", path=Path(sys.executable).parent)
    assert script, "the package is installed with its script"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"fastdiff \d+\.\d+\.\d+\n", done.stdout)


def test_memory_of_the_host_is_one_line(monkeypatch, capsys):
    def fail(args):
        raise MemoryError

    monkeypatch.setattr(cli.models, "run", fail)
    assert cli.main(["models"]) == 1
    assert capsys.readouterr().err == f"fastdiff: error: {cli.NO_MEMORY}\n"


def test_a_lost_device_ends_the_process_before_python_does(monkeypatch, capfd):
    """Python's shutdown would wait for the device, or print errors about it."""

    def fail(args):
        print("written")
        raise DeviceLostError("the GPU failed")

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(cli.models, "run", fail)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(cli.CTRL_C, "install", lambda: None)
    monkeypatch.setattr(sys, "argv", ["fastdiff", "models"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capfd.readouterr() == ("written\n", "fastdiff: error: the GPU failed\n")


UNSAYABLE = {
    "out": ["sample", "-o", "a\ud800"],
    "out-of-bulk": ["bulk", "--out=a\ud800"],
    "grid": ["sample", "--grid", "a\ud800.png"],
    "prompt-file": ["sample", "--prompt-file", "a\ud800"],
    "from": ["sample", "--from", "a\ud800.png"],
    "spec": ["bulk", "-o", "a", "--spec", "a\ud800.json"],
    "outputs": ["ui", "--outputs", "a\ud800"],
    "auth": ["ui", "--auth", "a\ud800"],
    "models-dir": ["ui", "--models-dir", "a\ud800"],
    "folder": ["status", "a\ud800"],
    "file": ["info", "a\ud800"],
    "model": ["verify", "a\ud800"],
    "json": ["bench", "emoji64", "--json", "a\ud800"],
    "command": ["a\ud800"],
    "NUL": ["sample", "-o", "a\0"],
}


@pytest.mark.parametrize("args", UNSAYABLE.values(), ids=UNSAYABLE)
def test_words_that_are_no_text_are_refused_before_anything_is_done(args, tmp_path, monkeypatch, capsys, files):
    monkeypatch.chdir(tmp_path)
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(r"fastdiff: error: '.*' holds (half a surrogate pair|NUL), .*; remove it\n", err)
    assert out == "" and files(tmp_path) == []


def test_names_of_bytes_that_are_no_text(here, tmp_path, refused):
    """Arguments that are not UTF-8 arrive as halves of surrogate pairs, and still name files."""
    name = os.fsdecode(b"\xff\xed\xa0\x80")
    done = here(
        *("sample", "-m", "emoji64", "--label", "noto drinks", "--steps", 1, "--num-images", 1, "--json", "-s", 7),
        *("-o", name, "--grid", f"{name}/all-{name}.png"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == f"{name}/noto-drinks-7.png"
    assert sorted(os.listdir(tmp_path / name)) == sorted(["noto-drinks-7.png", f"all-{name}.png"])
    assert here("info", f"{name}/noto-drinks-7.png").returncode == 0
    refused(here("info", f"no-{name}"), r"no-\\udcff\\udced")


def test_a_misspelt_command_is_refused_with_the_closest(here, refused):
    refused(here("smaple"), r"argument COMMAND: invalid choice: 'smaple'; did you mean sample\? see fastdiff --help$")
    refused(
        here("picture"),
        "argument COMMAND: invalid choice: 'picture'; choose from sample, bulk, .*; see fastdiff --help$",
    )


@pytest.mark.parametrize("flag", ["--seed=--", "--label=--", "-s--", "--out=--"])
def test_two_hyphens_are_no_value(capsys, flag):
    assert cli.main(["sample", flag]) == 2
    assert "expected one argument" in (said := capsys.readouterr().err) or "-- is not a value" in said


BAD = {
    "sample": ["--steps", "0"],
    "bulk": ["--out", "x", "--steps", "0"],
    "status": ["no-such"],
    "info": ["no-such.png"],
    "models": ["no-such"],
    "convert": ["no-such.safetensors", "--out", "x"],
    "verify": ["no-such"],
    "bench": ["no-such"],
    "ui": ["--port", "99999"],
    "serve": ["--model", "no-such"],
    "doctor": ["no-such"],
    "tune": ["no-such"],
    "warm": ["--model", "no-such"],
    "completion": ["tcsh"],
}


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_bad_input_of_each_command_is_one_line_and_writes_nothing(command, here, refused, tmp_path, files):
    done = here(command, *BAD[command])
    refused(done, "")
    assert len(done.stderr.splitlines()) == 1 and files(tmp_path) == []

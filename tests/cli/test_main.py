"""The command as a program: its script, and output that nobody reads."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastdiff import cli


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


@pytest.mark.parametrize("flag", ["--seed=--", "--label=--", "-s--", "--out=--"])
def test_two_hyphens_are_no_value(capsys, flag):
    assert cli.main(["sample", flag]) == 2
    assert "expected one argument" in (said := capsys.readouterr().err) or "-- is no value of it" in said

"""The commands of the README's first screen run as they are written."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from PIL import Image

from tests.tree.floors import ROOT

COMMANDS = [
    line
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("fastdiff ") and "path/to" not in line
]


def run(command: str, folder) -> subprocess.CompletedProcess:
    """Run a command of the README in a folder, with this checkout's fastdiff."""
    name, *arguments = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, "-m", name, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_first_screen_draws_by_prompt_by_steps_and_by_label():
    assert [
        bool(re.search(flag, line)) for flag, line in zip(("--prompt", "--steps 50", "--label"), COMMANDS, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_draws(command, tmp_path):
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = sorted((tmp_path / "outputs").glob("*.png"))
    assert drawn
    if "--steps" in command:
        for path in drawn:
            with Image.open(path) as picture:
                assert "Steps: 50," in picture.info["parameters"]

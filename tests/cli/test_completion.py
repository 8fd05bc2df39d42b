"""`fastdiff completion`: the scripts, and what bash completes with its script."""

import shutil
import subprocess

import pytest

from fastdiff import cli
from fastdiff.cli.completion import SHELLS
from fastdiff.sampler_names import SCHEDULERS
from tests.support.waiting import TIMEOUT

PRESS_TAB = """
source ./script
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_fastdiff
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def complete(here, tmp_path):
    """Returns what bash offers for the last word of a command line."""
    (tmp_path / "script").write_text(here("completion", "bash").stdout)

    def words(*line: str) -> set[str]:
        command = ["bash", "--norc", "-c", PRESS_TAB, "bash", "fastdiff", *line]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.stderr == "", done.stderr
        return set(done.stdout.split())

    return words


def test_bash_completes_commands_flags_and_names(complete):
    assert complete("sam") == {"sample"}
    assert complete("sample", "--sched") == {"--scheduler"}
    assert complete("sample", "--scheduler", "dpm++2s") == {name for name in SCHEDULERS if name.startswith("dpm++2s")}
    assert complete("sample", "--prompt", "a red fox", "-m", "emoji64") == {"emoji64", "emoji64-dit"}
    assert complete("verify", "emoji-") == {"emoji-sd"}
    assert complete("sample", "--control", "emoji") == {"emoji-edges"}
    assert complete("completion", "") == set(SHELLS)


def test_bash_completes_files_and_folders(complete, tmp_path):
    (tmp_path / "fox.png").touch()
    (tmp_path / "foxes").mkdir()
    assert complete("info", "fo") == complete("sample", "--from", "fo") == {"fox.png", "foxes"}
    assert complete("sample", "-m", "fo") == complete("status", "fo") == {"foxes"}
    for name in ("fox.safetensors", "fox.sft"):
        (tmp_path / name).touch()
    assert complete("sample", "-m", "fo") == complete("bench", "fo") == {"foxes", "fox.safetensors", "fox.sft"}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_all_commands_and_schedulers(here, shell):
    script = here("completion", shell).stdout
    assert [word for word in (*cli._COMMANDS, *SCHEDULERS, "emoji64-dit") if word not in script] == []


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_the_shell_parses_its_script(here, tmp_path, shell):
    (tmp_path / "script").write_text(here("completion", shell).stdout)
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=TIMEOUT)

"""Closed, full and unread streams, deleted folders, and messages that stay on one line."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdiff.cli.streams import MAX_MESSAGE, Notices, error_line
from tests.support.waiting import TIMEOUT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="closes streams as a POSIX shell does")

DRAW = "sample -m $TINY --label 0 --num-images 1 --steps 1"


@pytest.fixture
def shell(tmp_path, environment, tiny):
    """Runs `fastdiff ARGS` in a shell, with redirections such as >&- after it."""
    environment = environment | {"TINY": str(tiny)}

    def run(args: str, behind: str = "", before: str = "") -> subprocess.CompletedProcess:
        command = f"{before} '{sys.executable}' -m fastdiff {args} {behind}"
        return subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("behind", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_picture_is_drawn_whatever_is_closed(shell, tmp_path, files, behind):
    done = shell(DRAW, behind)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == ["outputs/class0-0.png"]
    assert done.stdout == "", "nothing that belongs on stderr"
    assert "2>" in behind or "wrote 1 picture" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "args",
    ["models", f"{DRAW} --json"]
    + [pytest.param(each, marks=pytest.mark.slow) for each in ("models emoji64", "info x.png", "verify emoji64")]
    + [pytest.param(f"{DRAW} --explain", marks=pytest.mark.slow)],
)
def test_what_would_be_printed_on_a_closed_stdout_is_not_made(shell, tmp_path, files, args):
    done = shell(args, ">&-")
    assert done.returncode == 2 and files(tmp_path) == []
    assert done.stderr == (
        "fastdiff: error: stdout is closed, so the output would be lost; leave out >&-, or redirect it with > FILE\n"
    )


def test_errors_with_stderr_closed_are_not_printed_elsewhere(shell):
    done = shell("models emoji65", "2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout_is_one_line(shell):
    done = shell("models emoji64", ">/dev/full")
    assert (done.returncode, done.stderr) == (1, "fastdiff: error: [Errno 28] No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_errors_that_cannot_be_printed_keep_their_exit_code(shell, unbuffered):
    assert shell("models emoji65", "2>/dev/full", before=f"PYTHONUNBUFFERED={unbuffered}").returncode == 2


@pytest.mark.parametrize("args", ["models", DRAW, "info x.png"])
def test_a_current_folder_that_is_gone(shell, args):
    done = shell(args, before="mkdir gone; cd gone; rmdir ../gone;")
    error = "fastdiff: error: the current folder cannot be used (No such file or directory); change to another one\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(error) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["-o", "a" * 300], ["-o", "a" * 300 + ".png"], ["-o", "b/" + "a" * 300 + "/{seed}-{label}.png"],
        ["-o", "b/" * 3000], ["--grid", "a" * 300 + ".png"], ["--grid", "b/" * 3000 + "a.png"],
        ["--from", "a" * 300], ["-m", "a" * 300], ["-m", "a" * 300 + "/b"], ["-m", "b/" * 3000],
        ["--variant", "a" * 300],
    ],
    ids=lambda args: f"{args[0]}-{len(args[1])}",
)  # fmt: skip
def test_paths_that_no_system_takes(here, tmp_path, refused, files, args):
    done = here("sample", "--label", 0, "--steps", 1, *args)
    refused(done, "")
    assert len(done.stderr) < MAX_MESSAGE + 100 and files(tmp_path) == []


@pytest.mark.parametrize("flag", ["--label", "--seed", "--model", "--from", "-o", "--scheduler", "--unknown"])
def test_long_inputs_are_shortened_and_the_remedy_stays(here, refused, flag):
    done = here("sample", "--num-images", 1, "--steps", 1, flag, "x y/ö" * 20_000)
    refused(done, ".*(; |is not a seed from 0 to 4294967295)")
    assert len(done.stderr) < MAX_MESSAGE + 100


def test_lines_of_usual_length_are_left_alone():
    path = "/a/long/folder" * 20 + ".png"
    assert error_line(f"{path} already exists") == f"{path} already exists"
    assert error_line("a\nb\x1b[2J") == "a\\nb\\x1b[2J"


@pytest.mark.parametrize("long", ["x" * 400_000, "x " * 200_000, "\n" * 100_000])
def test_the_beginning_and_the_remedy_of_a_long_line_stay(long):
    line = error_line(f"no model {long!r}; did you mean emoji64?")
    assert len(line) <= MAX_MESSAGE
    assert line.startswith("no model '") and line.endswith("; did you mean emoji64?")


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
@pytest.mark.parametrize("args", [["-m", "shut"], ["-m", "shut/model"], ["--from", "shut/a.png"], ["-o", "shut/out"]])
def test_a_missing_permission_is_said(here, tmp_path, refused, args):
    (tmp_path / "shut").mkdir(mode=0o000)
    done = here("sample", "--num-images", 1, *args)
    (tmp_path / "shut").chmod(0o700)
    refused(done, ".*Permission denied")


def test_json_lines_of_a_label_that_was_asked_for_twice(here, tmp_path, files):
    done = here(
        "sample", "--label", "noto food", "--label", "noto drinks", "-s", 7, "--steps", 1, "--json", "--num-images", 1
    )
    assert done.returncode == 0, done.stderr
    paths = [json.loads(line)["path"] for line in done.stdout.splitlines()]
    assert paths == ["outputs/noto-drinks-7.png", "outputs/noto-drinks-2-7.png"] and files(tmp_path) == sorted(paths)
    assert (tmp_path / paths[0]).read_bytes() == (tmp_path / paths[1]).read_bytes()


def test_a_line_is_said_once_whoever_says_it(capsys):
    log = logging.getLogger("fastdiff.models.autoencoder")
    with Notices() as notices:
        notices.say("the end is cut", "another")
        log.warning("the end is cut")
        log.warning("computed again in %s", "float32")
        notices.say("another", "x\ny" * 400)
        log.info("nobody asked")
    out, err = capsys.readouterr()
    *first, last = err.splitlines()
    assert out == "" and [line.strip() for line in first] == [
        "fastdiff: the end is cut",
        "fastdiff: another",
        "fastdiff: computed again in float32",
    ]
    assert last.startswith("fastdiff: x") and len(last) < 520
    log.warning("later")
    assert "later" not in capsys.readouterr().out and logging.getLogger("fastdiff").handlers == []


def test_a_log_has_a_line_at_the_start_and_at_the_end(here, tiny):
    done = here("sample", "-m", tiny, "--label", 0, "--num-images", 3, "--steps", 2)
    first, last = done.stderr.splitlines()
    assert first == "fastdiff: drawing 3 pictures with " + str(tiny) and "\r" not in done.stderr
    assert last.startswith("fastdiff: wrote 3 pictures to outputs in ")


def test_quiet_says_only_errors(here, tmp_path, refused):
    args = ["sample", "--quiet", "--prompt", "cat " * 100, "--steps", 1, "--grid"]
    for flags, lines in ((["--json"], 1), ([], 0), (["--steps", 2], 0)):
        done = here(*args, *flags)
        assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", lines)
    assert len(list((tmp_path / "outputs").iterdir())) == 4
    refused(here("sample", "-q", "--steps", 0), "steps: 0 is not")

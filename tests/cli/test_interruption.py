"""Ctrl-C at any moment, once or twice: one line, exit code 130 at once, and no partial files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.waiting import TIMEOUT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")

DRAW = ["sample", "--steps", "50", "--label", "0", "--num-images", "500", "-b", "1"]
# The command. It prints a line on stdout when its `main` begins.
PROGRAM = "import sys; from fastdiff import cli; print(flush=True); sys.argv[0] = 'fastdiff'; sys.exit(cli.main())"


def pictures(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def interrupted(tmp_path, environment, args, waits) -> tuple[int, str, int]:
    """Run the command and send a SIGINT after each wait.

    Returns the exit code, stderr, and the number of files written after the last signal.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *args],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.readline()
        for seconds in waits:
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
        before = len(pictures(tmp_path))
        _, error = process.communicate(timeout=TIMEOUT)
    return process.returncode, error, len(pictures(tmp_path)) - before


QUICK, SLOW = [[0.02], [0.25], [0.4, 0]], [[0.1], [0.5], [1.0], [0.1, 0.01], [3, 0.005]]


@pytest.mark.parametrize("waits", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=str)
def test_it_ends_at_once(tmp_path, environment, files, waits):
    code, error, written = interrupted(tmp_path, environment, DRAW, waits)
    assert code == 130, error
    assert "Traceback" not in error and error.count("fastdiff: interrupted") <= 1 and "Exception" not in error
    assert written <= 1, "only the picture in progress may be written, and no new one"
    assert all(name.endswith(".png") for name in files(tmp_path))


# The signal comes twice: the second one before, or just after, the line is written.
TWICE = """if True:
    import os, signal, sys
    from fastdiff.cli.interruption import CTRL_C
    write = os.write
    def press():
        signal.raise_signal(signal.SIGINT)
    def written(*args):
        write(*args)
        press()
    if sys.argv[1] == "before":
        CTRL_C.describe = lambda: press() or "interrupted"
    else:
        os.write, CTRL_C.describe = written, lambda: "interrupted"
    CTRL_C.install()
    press()
"""


@pytest.mark.parametrize("second", ["before", "after"])
def test_a_second_signal_while_it_ends_prints_no_second_line(environment, second):
    command = [sys.executable, "-c", TWICE, second]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.slow
def test_where_it_is_ignored_it_stays_ignored(tiny, tmp_path, environment):
    """A shell starts background commands like this."""
    command = [sys.executable, "-c", PROGRAM, "sample", "-m", tiny, "--steps", "1", "--label", "0", "--num-images", "1"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:  # fmt: skip
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, error


# The command. It gets the signal once or twice while its picture is synced to disk.
WRITES = """if True:
    import os, signal, sys, time
    from fastdiff import cli
    flush, signals = os.fsync, int(sys.argv.pop(1))
    def fsync(descriptor):
        os.kill(os.getpid(), signal.SIGINT)
        while not cli.CTRL_C.pressed:
            time.sleep(0.001)
        if signals == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(600)
        flush(descriptor)
    os.fsync = fsync
    sys.exit(cli.main())
"""


@pytest.mark.slow
def test_a_file_that_is_being_written_ends_first(here, tiny, tmp_path, environment, files):
    """The signal comes while the picture is synced to disk. A second signal does not wait."""
    draw = ["sample", "-m", str(tiny), "--steps", "1", "--label", "0", "--num-images", "1", "--device", "cpu", "-o"]
    for signals, expected in ((1, ["a.png"]), (2, [])):
        command = [sys.executable, "-c", WRITES, str(signals), *draw, "a.png"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 130, done.stderr
        assert done.stderr.endswith(
            f"fastdiff: interrupted; wrote {'1 picture to a.png' if expected else '0 of 1 picture'}\n"
        )
        assert [name for name in files(tmp_path) if name.endswith(".png")] == expected
        (tmp_path / "a.png").unlink(missing_ok=True)
    (leftover,) = os.listdir(tmp_path)
    assert leftover.startswith(".fastdiff-"), "the next run removes it"
    assert here(*draw, ".").returncode == 0
    assert not list(tmp_path.glob(".fastdiff-*"))

"""Temporary files: those of dead processes are removed, those of live processes and other hosts are not."""

import contextlib
import os
import subprocess
import sys

import pytest

from fastdiff.execution import temporaries

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is removed without locks")

HOLD = """if True:
    import sys
    from pathlib import Path
    from fastdiff.execution import temporaries
    with temporaries.holding(Path(sys.argv[1]), b"data") as path:
        print(path.name, flush=True)
        sys.stdin.readline()
"""


def abandoned(folder) -> str:
    return f"{folder}/.fastdiff-{temporaries._HOST}-{'0' * 16}.tmp"


def test_it_holds_the_data_and_goes(tmp_path):
    with temporaries.holding(tmp_path, b"data") as path:
        assert path.read_bytes() == b"data" and path.parent == tmp_path
        temporaries.remove_abandoned(tmp_path)
        assert path.exists(), "its process is alive"
    assert os.listdir(tmp_path) == []


def test_it_goes_with_an_error_too(tmp_path):
    with pytest.raises(KeyError), temporaries.holding(tmp_path, b"data"):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_only_those_of_processes_that_are_gone_are_removed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        name = process.stdout.readline().strip()
        temporaries.remove_abandoned(tmp_path)
        assert os.listdir(tmp_path) == [name]
        process.kill()
    assert os.listdir(tmp_path) == [name]
    temporaries.remove_abandoned(tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_is_not_ours_stays(tmp_path):
    others = [".fastdiff-x.tmp", f".fastdiff-another{temporaries._HOST}-{'0' * 16}.tmp", ".fastdiff-0123.tmp", "a.tmp"]
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "target").touch()
    os.symlink("target", abandoned(tmp_path))
    temporaries.remove_abandoned(tmp_path)
    assert len(os.listdir(tmp_path)) == 6
    os.unlink(abandoned(tmp_path))
    os.mkfifo(abandoned(tmp_path))
    temporaries.remove_abandoned(tmp_path)
    temporaries.remove_abandoned(tmp_path / "missing")
    assert len(os.listdir(tmp_path)) == 6


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    import fcntl

    def refuse(descriptor, operation):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with contextlib.suppress(FileNotFoundError), temporaries.holding(tmp_path, b"data") as path:
        temporaries.remove_abandoned(tmp_path)
        assert path.read_bytes() == b"data"


def test_a_file_that_another_process_took_before_the_lock_is_made_anew(tmp_path, monkeypatch):
    import fcntl

    lock, calls = fcntl.flock, []

    def late(descriptor, operation):
        if not calls:
            temporaries_seen = os.listdir(tmp_path)
            os.unlink(tmp_path / temporaries_seen[0])
        calls.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with temporaries.holding(tmp_path, b"data") as path:
        assert len(calls) == 2 and path.read_bytes() == b"data"

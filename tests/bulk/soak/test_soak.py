"""The soak test itself, with a hundred pictures and one kill."""

import argparse
import sys

import pytest

from tests.bulk.soak.__main__ import draw_with_kills, find_faults, read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="kills"),
    pytest.mark.usefixtures("one_thread"),  # like a worker
]


def test_what_is_killed_is_drawn_once_and_the_same(arguments, make_plan, worker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "fastdiff", *arguments, "--num-images", "100", "--workers", "1"]
    out, alone = tmp_path / "out", tmp_path / "alone"
    killed = draw_with_kills(command, out, argparse.Namespace(kills=1, seed=0), alone=0)
    assert sum(killed.values()) == 1
    worker(make_plan(num_images=100), alone).work()
    assert read(out) == read(alone) and len(read(out)) == 17
    assert find_faults(out, 100) == []


def test_faults_are_found(make_plan, worker, tmp_path):
    out = tmp_path / "out"
    worker(make_plan(num_images=7)).work()
    assert find_faults(out, 7) == []
    (out / "000001" / "000006.png").write_bytes(b"")
    (out / "left.tmp").touch()
    assert find_faults(out, 7) == ["000001 is not what its JSON file says", "left.tmp is left over"]
    (out / "000001" / "000006.png").unlink()
    assert "6 pictures, 6 different, of 7" in find_faults(out, 7)

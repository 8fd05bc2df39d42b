"""The benchmark of single files, as far as it runs without a GPU."""

import os
import subprocess
import sys

import pytest

from benchmarks.pictures.bench_single_file import draw, own_memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_of_a_running_process():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert 2**20 < own_memory(os.getpid()) < 2**40
    assert own_memory(ended.pid) == 0


@pytest.mark.slow
def test_a_command_that_fails_ends_the_benchmark(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"fastdiff sample failed:\nfastdiff: error: .*broken.safetensors"):
        draw(tmp_path / "broken.safetensors", tmp_path / "out.png", tmp_path)

"""The command in processes of its own: the same bits by any number of workers, whatever ends them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastdiff.bulk.claims import read_leases
from fastdiff.bulk.folder import Folder
from tests.bulk.soak.killing import children, kill, kill_all, wait_for

resource = pytest.importorskip("resource")  # of Unix
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="signals and /proc"),
    pytest.mark.usefixtures("one_thread"),  # as a worker has
]


@pytest.fixture
def expected(make_plan, worker, tmp_path, records):
    """The hashes of a run that one worker drew in this process."""
    worker(make_plan(), tmp_path / "alone").work()
    return records(tmp_path / "alone")


def end(process: subprocess.Popen) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


def done(out: Path) -> list[str]:
    return sorted(path.stem for path in (out / "shards").glob("??????.json"))


def test_two_workers_draw_the_same_bits_as_one(bulk, expected, records, tmp_path):
    code, stdout, stderr = end(bulk("--out", "out", "--workers", 2, "--json"))
    assert code == 0 and "20 of 20 pictures are in out" in stderr, stderr
    assert records(tmp_path / "out") == expected
    lines = [json.loads(line) for line in stdout.splitlines()]
    assert sorted(line["shard"] for line in lines) == [0, 1, 2, 3] and sum(line["count"] for line in lines) == 20
    code, stdout, stderr = end(bulk("--out", "out", "--verify"))  # comes at once: nothing is to be drawn
    assert (code, stdout) == (0, "") and "all 4 shards in out are done" in stderr


def test_three_workers_killed_one_by_one_and_all_at_once(bulk, make_plan, worker, digests, records, tmp_path):
    """SIGKILL at random moments; then the same command goes on, and every picture is there once."""
    seed = random.randrange(2**32)
    print(f"random.Random({seed})")
    chance, steps = random.Random(seed), ("--steps", 40)
    out = tmp_path / "out"
    launcher = bulk("--out", out, "--workers", 3, *steps)
    for alive in (3, 3):
        wait_for(lambda alive=alive: len(children(launcher.pid)) == alive and read_leases(out / "shards"), launcher)
        time.sleep(chance.uniform(0, 0.5))
        kill(chance.choice(children(launcher.pid) or [2**22 + 1]))
        if launcher.poll() is not None:
            break
        time.sleep(0.5)  # until torchrun sees it
    time.sleep(chance.uniform(0, 3))
    kill_all(launcher)
    code, _, stderr = end(bulk("--out", out, "--workers", 2, *steps))
    assert code == 0, stderr
    worker(make_plan(num_inference_steps=40), tmp_path / "alone").work()
    assert digests(out) == digests(tmp_path / "alone") and records(out) == records(tmp_path / "alone")
    assert len(digests(out)) == 20 and not list(out.glob(".*-*.tmp"))


def test_two_launchers_share_one_folder(bulk, make_plan, worker, records, tmp_path, text_folder):
    plan = make_plan(text_folder("sd1"), prompt=("a cat",), height=16, width=16)
    flags = ["-m", text_folder("sd1"), "--prompt", "a cat", "--height", 16, "--width", 16, "--workers", 1]
    every = [bulk("--out", "out", *flags) for _ in range(2)]
    assert [code for code, _, _ in map(end, every)] == [0, 0]
    worker(plan, tmp_path / "alone").work()
    assert records(tmp_path / "out") == records(tmp_path / "alone") and len(records(tmp_path / "out")) == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_soon_and_the_same_command_goes_on(bulk, tmp_path, number, code, make_plan, worker):
    out, steps = tmp_path / "out", 100
    launcher = bulk("--out", out, "--workers", 1, "--steps", steps)
    wait_for(lambda: done(out) and read_leases(out / "shards"), launcher)
    start = time.monotonic()
    launcher.send_signal(number)
    ended, _, stderr = end(launcher)
    assert ended == code and time.monotonic() - start < 20
    assert "interrupted; " in stderr and "the same command goes on" in stderr
    assert not list((out / "shards").glob("*.lease-*")) and not list((out / "shards").glob("*.attempts.json"))
    plan = make_plan(num_inference_steps=steps)
    folder, there = Folder(out, "png"), done(out)
    assert 0 < len(there) < 4 and [shard.name for shard in plan.shards if folder.is_done(shard)] == there


def test_torchrun_starts_workers_too(bulk, expected, records, tmp_path, model):
    launcher = bulk("--out", "out")
    kill_all(launcher)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *launcher.args[2:]]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert records(tmp_path / "out") == expected and "20/20 pictures" in done.stderr


def test_a_worker_of_other_bits_is_refused_in_one_line(bulk, make_plan, worker, pipes, tmp_path):
    plan = make_plan()
    worker(plan, fingerprint={**pipes(plan)[1], "torch": "1.0"})
    code, stdout, stderr = end(bulk("--out", "out", "--workers", 1))
    assert (code, stdout) == (2, "") and "Traceback" not in stderr
    assert stderr.count("fastdiff: error: ") == 1 and "is drawn with other bits: here torch 2" in stderr


def test_a_shard_that_ends_its_workers_is_given_up(bulk, tmp_path):
    """It costs three restarts, and no more, even where torchrun starts them once only."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "from fastdiff.bulk import launching\n"
        "from fastdiff.runs import drawing\n"
        "launching.RESTARTS = 1\n"
        "def draw(run, *rest, draw=drawing.draw):\n"
        "    if run.cells[0].seed == 6:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return draw(run, *rest)\n"
        "drawing.draw = draw\n"
    )
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code, _, stderr = end(bulk("--out", "out", "--workers", 1, PYTHONPATH=paths))
    assert code == 1 and "1 of 4 shards given up" in stderr and "shard 000001: " in stderr, stderr
    assert "died while drawing it" in stderr and done(tmp_path / "out") == ["000000", "000002", "000003"]


def test_a_full_disk_ends_it_in_one_line(bulk, make_plan, worker, tmp_path, records):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))  # of a tar of 6 pictures
    try:
        full = bulk("--out", "out", "--workers", 1, "--format", "webdataset")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    code, stdout, stderr = end(full)
    assert (code, stdout) == (1, "") and "Traceback" not in stderr and stderr.count("fastdiff: error: ") == 1
    assert "cannot write" in stderr and "(File too large); make room, and run the same command again" in stderr
    assert sorted(os.listdir(tmp_path / "out")) == ["plan.json", "shards"]
    assert not list((tmp_path / "out/shards").glob("0*"))
    for name in ("out", "alone"):
        worker(make_plan(format="webdataset"), tmp_path / name).work()
    assert records(tmp_path / "out") == records(tmp_path / "alone")

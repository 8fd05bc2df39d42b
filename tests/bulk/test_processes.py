"""The command in separate processes: the same bits for any number of workers, however they end."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import fastdiff
from fastdiff.bulk.attempts import Attempts
from fastdiff.bulk.claims import read_leases
from fastdiff.bulk.folder import Folder
from fastdiff.cli import main
from fastdiff.runs.drawing import Progress
from tests.bulk.soak.killing import children, kill, kill_all, wait_for
from tests.support import waiting
from tests.support.waiting import TIMEOUT

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="signals and /proc"),
    pytest.mark.usefixtures("one_thread"),  # like a worker
]


def end(process: subprocess.Popen) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=TIMEOUT)
    return process.returncode, stdout, stderr


def done(out: Path) -> list[str]:
    return sorted(path.stem for path in (out / "shards").glob("??????.json"))


def draws(out: Path) -> bool:
    return bool(read_leases(out / "shards"))


@pytest.fixture
def chance() -> random.Random:
    seed = random.randrange(2**32)
    print(f"random.Random({seed})")
    return random.Random(seed)


def paint(run, pipe, records, *, wait) -> Iterator[Progress]:
    """Draw without torch, whose threads do not survive a fork: a picture of one colour per seed."""
    for place, cell in enumerate(run.cells):
        time.sleep(0.004)
        image = Image.new("RGB", (8, 8), (cell.seed, 0, 0))
        step = SimpleNamespace(index=0, num_steps=1, notice=None, trajectories=None, images=[image])
        yield Progress(run, range(place, place + 1), step, 0.0, ())


def test_workers_killed_at_random_moments(make_plan, worker, digests, records, chance, tmp_path, monkeypatch):
    """Three workers at a time, forked from this process. SIGKILL hits one or all while others begin and commit."""
    monkeypatch.setattr("fastdiff.bulk.worker.draw", paint)
    monkeypatch.setattr("fastdiff.bulk.claims.DEAD", 1.0)  # for a process killed before it wrote its lease
    monkeypatch.setattr("fastdiff.bulk.claims.BEAT", 0.1)
    plan, out = make_plan(num_images=90, shard_size=3), tmp_path / "out"
    worker(plan, tmp_path / "alone").work()

    def begin() -> int:
        pid = os.fork()
        if not pid:
            try:
                worker(plan, out).work()
            finally:
                os._exit(0)
        return pid

    worker(plan, out)
    running: list[int] = []
    for launch in range(12):
        Attempts(out / "shards").begin_launch(str(launch))  # three deaths in one launch would give a shard up
        running += [begin() for _ in range(3 - len(running))]
        time.sleep(chance.uniform(0, 0.02))
        for pid in chance.choice([running[:1], running[1:2], running]):
            kill(pid)
            os.waitpid(pid, 0)
            running.remove(pid)
    worker(plan, out).work()
    for pid in running:
        os.waitpid(pid, 0)
    assert digests(out) == digests(tmp_path / "alone") and records(out) == records(tmp_path / "alone")
    folder = Folder(out, "png")
    assert len(digests(out)) == 90 and all(folder.verify(shard) is None for shard in plan.shards)
    assert set(os.listdir(out)) == {*(shard.name for shard in plan.shards), "plan.json", "shards"}
    assert set(done(out)) == {path.stem for path in (out / "shards").iterdir() if not path.name.startswith("launch-")}


# Run by the workers: the worker that draws this seed waits after each step while the file "hold" exists.
HELD = """
import os, time
from fastdiff.runs import drawing
def draw(run, *rest, draw=drawing.draw, **options):
    for progress in draw(run, *rest, **options):
        while any(run.cells[i].seed == {seed} for i in progress.places) and os.path.exists("hold"):
            time.sleep(0.01)
        yield progress
drawing.draw = draw
"""


@pytest.fixture
def hold(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Makes one worker wait at a picture while the returned file exists."""

    def hold(seed: int) -> Path:
        (tmp_path / "sitecustomize.py").write_text(HELD.format(seed=seed))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
        (tmp_path / "hold").touch()
        return tmp_path / "hold"

    return hold


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one worker", "two workers"])
def launcher(request, start, hold, arguments, chance, tmp_path) -> subprocess.Popen:
    """A launcher whose workers draw and cannot finish."""
    hold(chance.randrange(20))
    launcher = start("fastdiff", *arguments, "--workers", request.param)
    launcher.workers = request.param
    wait_for(lambda: len(children(launcher.pid)) == request.param and draws(tmp_path / "out"), launcher)
    return launcher


@pytest.mark.slow
def test_it_goes_on_whatever_ended_it(
    launcher, here, arguments, make_plan, worker, digests, records, chance, tmp_path, monkeypatch, capsys
):
    """A worker is killed, and torchrun restarts all. Then all are killed, and the same command draws the rest."""
    out, first, count = tmp_path / "out", children(launcher.pid), launcher.workers
    time.sleep(chance.uniform(0, 0.3))
    kill(chance.choice(first))
    wait_for(lambda: len(set(children(launcher.pid)) - set(first)) == count and draws(out), launcher)
    time.sleep(chance.uniform(0, 0.3))
    kill_all(launcher)
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--workers", "1"]) == 0, capsys.readouterr().err
    worker(make_plan(), tmp_path / "alone").work()
    assert digests(out) == digests(tmp_path / "alone") and records(out) == records(tmp_path / "alone")
    assert len(digests(out)) == 20 and not list(out.glob(".*-*.tmp"))


@pytest.mark.slow
def test_ctrl_c_ends_it_soon(start, arguments, tmp_path, make_plan):
    """The run ends before all pictures are drawn, which would take minutes."""
    out, plan = tmp_path / "out", make_plan(num_images=5000, num_inference_steps=10)
    launcher = start("fastdiff", *arguments, "--workers", 1, "--num-images", 5000, "--steps", 10)
    wait_for(lambda: done(out) and draws(out), launcher)
    for pid in [launcher.pid, *children(launcher.pid)]:  # like a terminal
        os.kill(pid, signal.SIGINT)
    code, _, stderr = end(launcher)
    assert code == 130
    assert "interrupted; " in stderr and "run the same command again" in stderr and "death signal" not in stderr
    assert not list((out / "shards").glob("*.lease-*")) and not list((out / "shards").glob("*.attempts.json"))
    folder, there = Folder(out, "png"), done(out)
    assert 0 < len(there) < 400 and [shard.name for shard in plan.shards if folder.is_done(shard)] == there


@pytest.mark.slow
def test_three_workers_of_two_launchers_draw_what_one_draws(
    start, hold, here, arguments, make_plan, worker, records, tmp_path, monkeypatch, capsys
):
    """Two workers of torchrun and one of our own launcher, in this process, share a folder."""
    out, held = tmp_path / "out", hold(7)
    torchrun = start("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "fastdiff", *arguments)
    wait_for(lambda: "000001" in read_leases(out / "shards"), torchrun)
    monkeypatch.chdir(tmp_path)
    threading.Thread(target=lambda: (waiting.wait_for(lambda: len(done(out)) == 3), held.unlink())).start()
    assert main([*arguments, "--workers", "1"]) == 0
    said = capsys.readouterr().err
    code, _, stderr = end(torchrun)
    assert code == 0, stderr
    assert "20 of 20 pictures are in out" in stderr and "20 of 20" in said
    worker(make_plan(), tmp_path / "alone").work()
    assert records(out) == records(tmp_path / "alone")


# Run by the workers: every worker that draws seed 5 is killed. The third one first waits while the file "hold" exists.
KILLED = """
import os, signal, time
from fastdiff.bulk import launching
from fastdiff.runs import drawing
launching.RESTARTS = 1
def draw(run, *rest, draw=drawing.draw, **options):
    if run.cells[0].seed == 5:
        with open("deaths", "a") as deaths:
            deaths.write("x")
        while os.path.getsize("deaths") == 3 and os.path.exists("hold"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(run, *rest, **options)
drawing.draw = draw
"""
ASKED = {"seed": 3, "num_images": 4, "num_inference_steps": 2, "dtype": "float32"}


@pytest.fixture
def made(labelled, tmp_path, monkeypatch):
    """Returns the future of a draw_many call: a shard has killed two workers, and the third one waits."""
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    (tmp_path / "hold").touch()
    with monkeypatch.context() as patched, ThreadPoolExecutor() as pool:
        patched.chdir(tmp_path)
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
        patched.setenv("OMP_NUM_THREADS", "1")
        flags = ASKED | {"shard_size": 6, "workers": 1, "device": "cpu"}
        drawing = pool.submit(fastdiff.draw_many, labelled, "out", label=[2, "0"], **flags)
        deaths = tmp_path / "deaths"
        waiting.wait_for(lambda: drawing.done() or (deaths.exists() and deaths.stat().st_size == 3))
        yield drawing
        (tmp_path / "hold").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_shard_that_ends_its_workers_is_given_up(capfd, made, labelled, make_plan, worker, digests, tmp_path):
    """It costs exactly three restarts, even if torchrun restarts workers only once. All from Python."""
    (tmp_path / "hold").unlink()
    out, made = tmp_path / "out", made.result()
    assert (made.folder, made.pictures, list(made.given_up)) == (Path("out"), 6, ["000001"])
    assert "died while drawing it" in made.given_up["000001"] and done(out) == ["000000"]
    assert (tmp_path / "deaths").stat().st_size == 3
    assert "gave up on 1 of 2 shards" in capfd.readouterr().err
    for folder in (out, tmp_path / "alone"):
        plan = make_plan(labelled, label=(2, 0), **ASKED)
        Attempts(worker(plan, folder).folder.shards).begin_launch("the next")
        worker(plan, folder).work()
    assert digests(out) == digests(tmp_path / "alone")

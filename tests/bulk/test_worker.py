"""A worker in this process: what it draws, what it resumes, and what it records of a shard."""

import errno
import json
import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff.bulk import worker as worker_module
from fastdiff.bulk.attempts import Attempts
from fastdiff.bulk.folder import Folder, Record
from fastdiff.bulk.worker import Stopped
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.requests import png
from fastdiff.runs.drawing import draw, wait_for_pictures
from tests.support.waiting import TIMEOUT

resource = pytest.importorskip("resource")  # Unix only
pytestmark = pytest.mark.usefixtures("one_thread")  # like a worker


@pytest.fixture
def drawn(pipes):
    """The pictures that `sample` draws for a plan, as arrays."""

    def of(plan):
        run = replace(plan.run, batch_size=1)
        return [np.asarray(done.image) for at in draw(run, pipes(plan)[0]) for done in at.finished]

    return of


def test_rows_start_from_their_own_pictures(make_plan, worker, drawn, text_folder, tmp_path):
    for name in ("a", "b"):
        Image.effect_noise((16, 24), 90).save(tmp_path / f"{name}.png")
    rows = "prompt,image,strength\na cat,a.png,0.5\na cat,b.png,0.5\na cat,a.png,1\na cat,b.png,1\n"
    (tmp_path / "a.csv").write_text(rows)

    def plan(batch_size):
        return make_plan(text_folder("sd1"), spec=str(tmp_path / "a.csv"), num_images=None, batch_size=batch_size)

    pictures = drawn(plan(1))
    assert len({each.tobytes() for each in pictures}) == 4
    for batch_size in (1, 4):
        worker(plan(batch_size), out := tmp_path / f"{batch_size}").work()
        for path, expected in zip(sorted(out.rglob("*.png")), pictures, strict=True):
            assert np.array_equal(np.asarray(Image.open(path)), expected)
    records = [png.read_settings(path) for path in sorted(out.rglob("*.png"))]
    assert [each["strength"] for each in records] == [0.5, 0.5, 1, 1]
    assert [each["init_image"] for each in records] == [str(tmp_path / f"{name}.png") for name in "abab"]


def test_rows_with_masks_and_larger_pictures_are_those_of_sample(make_plan, worker, drawn, text_folder, tmp_path):
    for i, name in enumerate(("a", "b", "m", "n")):
        Image.effect_noise((16, 16), 90 + i).save(tmp_path / f"{name}.png")
    masked = "prompt,image,mask,seed\na cat,a.png,m.png,1\na cat,b.png,n.png,2\na cat,a.png,n.png,3\na cat,a.png,,4\n"
    for name, rows, options in (
        ("masks", masked, {"mask_blur": 1.0}),
        ("crops", masked.replace("a.png,,", "a.png,m.png,"), {"mask_crop": 2}),
        ("larger", "prompt,seed\na cat,1\na fox,2\na cat,3\n", {"upscale": 1.5, "upscale_strength": 0.6}),
    ):
        (tmp_path / "a.csv").write_text(rows)
        options |= {"spec": str(tmp_path / "a.csv"), "num_images": None, "num_inference_steps": 4}
        pictures = drawn(make_plan(text_folder("sd1"), batch_size=1, **options))
        assert len({each.tobytes() for each in pictures}) == len(pictures) >= 3
        worker(make_plan(text_folder("sd1"), batch_size=4, **options), out := tmp_path / name).work()
        for path, expected in zip(sorted(out.rglob("*.png")), pictures, strict=True):
            assert np.array_equal(np.asarray(Image.open(path)), expected), path


def test_the_pictures_are_those_of_sample_in_batches_of_any_size(make_plan, worker, drawn, tmp_path):
    pictures = drawn(make_plan())
    for batch_size in (1, 4, 50):
        plan, out = make_plan(batch_size=batch_size), tmp_path / f"{batch_size}"
        worker(plan, out).work()
        paths = sorted(out.rglob("*.png"))
        assert [path.relative_to(out).as_posix() for path in paths][:7] == [
            *(f"000000/00000{i}.png" for i in range(6)),
            "000001/000006.png",
        ]
        for path, expected, cell in zip(paths, pictures, plan.run.cells, strict=True):
            assert np.array_equal(np.asarray(Image.open(path)), expected), batch_size
            assert png.read_settings(path)["seed"] == cell.seed


def test_nothing_is_left_but_what_belongs_there(make_plan, worker, tmp_path):
    worker(make_plan()).work()
    assert sorted(os.listdir(tmp_path / "out")) == ["000000", "000001", "000002", "000003", "plan.json", "shards"]
    assert sorted(os.listdir(tmp_path / "out/shards")) == [f"00000{i}.json" for i in range(4)]


def test_labels_and_prompts_share_batches(make_plan, worker, labelled, text_folder, tmp_path, monkeypatch):
    batches = []

    def listed(run, *rest, **options):
        batches.append(run)
        return draw(run, *rest, **options)

    monkeypatch.setattr(worker_module, "draw", listed)
    worker(make_plan(labelled, num_images=2, shard_size=6, batch_size=6), tmp_path / "a").work()
    worker(make_plan(text_folder("sd1"), prompt=("a cat", "a fox"), num_images=1), tmp_path / "b").work()
    assert [len({cell.label_name or cell.prompt for cell in run.cells}) for run in batches] == [3, 2]
    settings = [png.read_settings(path) for path in sorted((tmp_path / "b").rglob("*.png"))]
    assert [each["prompt"] for each in settings] == ["a cat", "a fox"]
    assert len({each["model_hash"] for each in settings}) == 1


def test_a_prompt_is_encoded_once(make_plan, worker, pipes, text_folder, monkeypatch):
    plan = make_plan(text_folder("sd1"), prompt=("a dog",), num_images=3, shard_size=1, negative_prompt="bad")
    encoders, encoded = pipes(plan)[0].encoders, []
    encode = encoders._encode
    monkeypatch.setattr(encoders, "_encode", lambda texts, *rest: encoded.append(texts) or encode(texts, *rest))
    worker(plan).work()
    assert sorted(encoded) == [("a dog",), ("bad",)]


def test_it_goes_on_with_what_is_not_done(make_plan, worker, tmp_path, digests, records):
    plan = make_plan()
    worker(plan, tmp_path / "whole").work()
    out = tmp_path / "out"
    stopped = worker(plan)
    stopped.plan = replace(plan, run=replace(plan.run, cells=plan.run.cells[:12]))  # only the first two shards
    stopped.work()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.png")}
    assert len(times) == 12
    worker(plan).work()
    assert digests(out) == digests(tmp_path / "whole") and records(out) == records(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


def test_a_stop_ends_the_batch_and_leaves_nothing_of_its_shard(make_plan, worker, tmp_path, monkeypatch):
    plan, steps = make_plan(batch_size=3), []
    stopping = worker(plan)

    def watched(*args, **options):
        for progress in draw(*args, **options):
            steps.append((progress.places, progress.step.index))
            if len(steps) == 5:  # the first step of the second shard
                stopping.stop.ask(signal.SIGTERM)
            yield progress

    monkeypatch.setattr(worker_module, "draw", watched)
    with pytest.raises(Stopped):
        stopping.work()
    assert steps[4:] == [(range(3), 0), (range(3), 1)] and stopping.stop.exit_code == 143
    left = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").glob("*/*.*"))
    assert left == [*(f"000000/00000{i}.png" for i in range(6)), "shards/000000.json"]
    monkeypatch.setattr(worker_module, "draw", draw)
    worker(plan).work()
    assert len(list((tmp_path / "out").rglob("*.png"))) == 20


def test_a_batch_that_takes_long_ends_with_its_step(make_plan, worker, monkeypatch):
    steps = []
    stopping = worker(make_plan())
    monkeypatch.setattr("fastdiff.bulk.stopping.PATIENCE", -1)

    def watched(*args, **options):
        for progress in draw(*args, **options):
            steps.append(progress.step.index)
            stopping.stop.ask(signal.SIGINT)
            yield progress

    monkeypatch.setattr(worker_module, "draw", watched)
    with pytest.raises(Stopped):
        stopping.work()
    assert steps == [0] and stopping.stop.exit_code == 130


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (draw, NonFiniteError("NaN in it")),
        (wait_for_pictures, MemoryError("none left")),
        (draw, ValueError("a\nb")),
        pytest.param(wait_for_pictures, NonFiniteError("NaN in it"), marks=pytest.mark.slow),
        pytest.param(draw, MemoryError("none left"), marks=pytest.mark.slow),
        pytest.param(wait_for_pictures, ValueError("a\nb"), marks=pytest.mark.slow),
    ],
)
def test_a_shard_that_fails_three_times_is_given_up(make_plan, worker, tmp_path, monkeypatch, error, place):
    """The error comes when drawing begins, or when its pictures are awaited."""
    tries = []

    def failing(it, *rest, **options):
        run = it if place is draw else it.run
        if run.cells[0].seed == 6:
            tries.append(run)
            raise error
        return place(it, *rest, **options)

    monkeypatch.setattr(worker_module, place.__name__, failing)
    worker(make_plan()).work()
    attempts = Attempts(tmp_path / "out/shards")
    reason = f"{type(error).__name__}: {str(error).split()[0]}"
    assert len(tries) == (3 if place is draw else 6)  # batches
    assert attempts.given_up()["000001"].startswith(reason)
    assert len(list((tmp_path / "out").rglob("*.png"))) == 14
    monkeypatch.setattr(worker_module, place.__name__, place)
    worker(make_plan()).work()  # in the same launch
    assert len(list((tmp_path / "out").rglob("*.png"))) == 14
    attempts.begin_launch("the next")
    worker(make_plan()).work()
    assert len(list((tmp_path / "out").rglob("*.png"))) == 20 and not attempts.given_up()


def test_a_batch_begins_before_the_pictures_of_the_one_before_are_there(make_plan, worker, monkeypatch):
    """The next batch begins before the pictures of the last, within a shard and across shards, but never two ahead."""
    begun, fetched, ahead = 0, 0, []
    changed = threading.Condition()

    def counted(*args, **options):
        nonlocal begun
        for progress in draw(*args, **options):
            with changed:
                begun += progress.step.index == 0
                changed.notify_all()
            yield progress

    def waiting(progress, records):
        nonlocal fetched
        with changed:
            assert fetched == 7 or changed.wait_for(lambda: begun > fetched + 1, timeout=TIMEOUT)
            ahead.append(begun - fetched)
            fetched += 1
        return wait_for_pictures(progress, records)

    monkeypatch.setattr(worker_module, "draw", counted)
    monkeypatch.setattr(worker_module, "wait_for_pictures", waiting)
    worker(make_plan(batch_size=3, num_images=24)).work()
    assert ahead == [2] * 7 + [1]


def test_what_no_shard_is_to_blame_for_ends_the_worker(make_plan, worker, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "draw", lambda *_, **__: (_ for _ in ()).throw(InputError("no such scheduler")))
    with pytest.raises(InputError, match="no such scheduler"):
        worker(make_plan()).work()
    assert os.listdir(tmp_path / "out/shards") == []


@pytest.mark.parametrize("format", ["png", "webdataset", "npz"])
def test_a_full_disk_stops_it_with_nothing_half(make_plan, worker, tmp_path, format, records):
    plan = make_plan(height=32, width=32, format=format, num_images=4, shard_size=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = worker(plan)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # a lease has 512 bytes, a picture some 3,000
    try:
        with pytest.raises(OSError, match=r"cannot write .*000000.* \(File too large\); free space, and run"):
            full.work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(tmp_path / "out")) == ["plan.json", "shards"]
    assert os.listdir(tmp_path / "out/shards") == []
    worker(plan).work()
    worker(plan, tmp_path / "whole").work()
    assert records(tmp_path / "out") == records(tmp_path / "whole")


def test_a_full_tmpfs(make_plan, worker, tmp_path):
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=48k none {tmp_path} 2>/dev/null"):
        pytest.skip("no tmpfs can be mounted")
    try:
        plan = make_plan(height=32, width=32, num_images=60)
        full = worker(plan)
        with pytest.raises(OSError) as raised:
            full.work()
        assert raised.value.__cause__.errno == errno.ENOSPC and "free space" in str(raised.value)
        out, done = tmp_path / "out", [shard for shard in plan.shards if full.folder.is_done(shard)]
        assert sorted(os.listdir(out)) == [*(shard.name for shard in done), "plan.json", "shards"]
        assert sorted(os.listdir(out / "shards")) == [f"{shard.name}.json" for shard in done]
        assert all(full.folder.verify(shard) is None for shard in plan.shards)
    finally:
        os.system(f"umount {tmp_path}")


def test_pixels_have_a_hash_of_their_own(make_plan, worker, tmp_path, monkeypatch, records):
    worker(make_plan(), tmp_path / "a").work()
    monkeypatch.setattr("fastdiff.execution.devices.device_name", lambda device: "another card")
    worker(make_plan(), tmp_path / "b").work()
    ours, theirs = records(tmp_path / "a"), records(tmp_path / "b")
    assert [pixels for _, pixels in ours.values()] == [pixels for _, pixels in theirs.values()]
    assert all(ours[name][0] != theirs[name][0] for name in ours)


def test_a_batch_that_does_not_fit_is_said_once(make_plan, pipes, worker, monkeypatch):
    said = []
    drawing = worker(make_plan())
    drawing._say = said.append

    def halved(*args, **options):
        for progress in draw(*args, **options):
            yield replace(progress, step=replace(progress.step, at_once=2))

    monkeypatch.setattr(worker_module, "draw", halved)
    drawing.work()
    assert said == ["out of memory for 4 pictures at a time; continuing with at most 2; the pictures are the same"]


def test_the_gpus_seconds_are_those_of_steps_alone(make_plan, monkeypatch):
    """Batches of 4 steps: the first takes 1,000 ms of the host, the last 2,000 ms, each other one 5 ms of the GPU."""

    class Event:
        now = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = Event.now

        def elapsed_time(self, other):
            return other.at - self.at

    def steps():
        for _ in range(3):
            for index in range(4):
                Event.now += (1000, 5, 5, 2000)[index]
                yield SimpleNamespace(step=SimpleNamespace(index=index, num_steps=4), ended=index == 3)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = worker_module.StepTimes(torch.device("cuda"))
    for _ in times.of(steps()):
        Event.now += 300  # by the worker itself
    assert times.seconds() == pytest.approx(3 * 4 * 0.005)


def test_the_json_of_a_shard(make_plan, worker, tmp_path):
    worker(make_plan()).work()
    record = json.loads((tmp_path / "out/shards/000003.json").read_text())
    assert (record["shard"], record["count"], record["gpu_seconds"]) == (3, 2, None)
    assert record["worker"].endswith(f":{os.getpid()}") and 0 < record["seconds"] < 1000
    assert record["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out/000003").iterdir())
    assert Record.read(tmp_path / "out/shards/000003.json") == Record(**record)


def test_one_that_was_quicker_is_believed(make_plan, worker, tmp_path, monkeypatch, records):
    """Two workers that hold one shard draw the same bits, and the second finds it done."""
    first, second = worker(make_plan()), worker(make_plan())

    def slow(*args, **options):
        monkeypatch.setattr(worker_module, "draw", draw)
        monkeypatch.setattr(first._claims, "claim", lambda name, claim=first._claims.claim: claim(f"other-{name}"))
        first.work()
        return draw(*args, **options)

    monkeypatch.setattr(worker_module, "draw", slow)
    second.work()
    assert len(list((tmp_path / "out").rglob("*.png"))) == 20
    assert all(Folder(tmp_path / "out", "png").verify(shard) is None for shard in make_plan().shards)

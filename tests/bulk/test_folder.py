"""The folder of a run: what it refuses, and the damage to shards that it finds."""

import json
import shutil

import pytest

from fastdiff.bulk.fingerprint import differences
from fastdiff.bulk.folder import Folder, write_file
from fastdiff.errors import InputError


def test_two_launchers_agree_on_one_plan(make_plan, worker, tmp_path):
    worker(make_plan())
    content = (tmp_path / "out/plan.json").read_bytes()
    worker(make_plan(batch_size=1))
    assert (tmp_path / "out/plan.json").read_bytes() == content


def test_of_two_workers_that_begin_at_once_the_first_writes_the_plan(make_plan, worker, pipes, tmp_path, monkeypatch):
    plan = make_plan()
    with monkeypatch.context() as patched:

        def write_later(path, data, **options):
            patched.undo()
            worker(plan, fingerprint={**pipes(plan)[1], "torch": "another"})
            write_file(path, data, **options)

        patched.setattr("fastdiff.bulk.folder.write_file", write_later)
        with pytest.raises(InputError, match=r"bits would differ from .*: this is torch .*, not another"):
            worker(plan)
    assert json.loads((tmp_path / "out/plan.json").read_text())["fingerprint"]["torch"] == "another"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "seeds 5 to 24, not 0 to 19"),
        ({"num_inference_steps": 3}, "steps 3, not 2;"),
        ({"scheduler": "ddpm", "num_inference_steps": 3}, "scheduler ddpm, not ddim; steps 3, not 2"),
        ({"format": "npz"}, "format npz, not png"),
    ],
)
def test_another_request_is_refused_by_what_differs(make_plan, worker, tmp_path, change, message):
    worker(make_plan())
    for refuse in (Folder(tmp_path / "out", "png").check, worker):
        with pytest.raises(InputError, match=f"holds another run: this one has .*{message}"):
            refuse(make_plan(**change))


@pytest.mark.parametrize("name", ["torch", "device", "dtype", "float32 products", "model files", "triton"])
def test_a_worker_that_draws_other_bits_is_refused(make_plan, worker, pipes, tmp_path, name):
    worker(make_plan())
    other = dict(pipes(make_plan())[1]) | {name: "another"}
    with pytest.raises(InputError, match=f"bits would differ from .*: this is {name} another, not .*--allow-mixed"):
        worker(make_plan(), fingerprint=other)
    worker(make_plan(), fingerprint=other, allow_mixed=True)


def test_shards_of_a_mixed_run_name_their_own(make_plan, worker, pipes, tmp_path):
    plan = make_plan()
    mixed = worker(plan, fingerprint={**pipes(plan)[1], "torch": "another"})
    mixed.work()
    saved = json.loads((tmp_path / "out/plan.json").read_text())["fingerprint"]
    record = json.loads((tmp_path / "out/shards/000000.json").read_text())
    assert saved["torch"] == "another" and record["fingerprint"] == mixed._fingerprint


def test_another_folder_is_left_alone(make_plan, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("all of it")
    with pytest.raises(InputError, match=r"holds thesis\.txt but no plan\.json; choose an empty or new folder"):
        Folder(tmp_path / "out", "png").check(make_plan())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "plan": 3}'])
def test_a_damaged_plan_is_refused(make_plan, worker, tmp_path, content):
    worker(make_plan())
    (tmp_path / "out/plan.json").write_text(content)
    with pytest.raises((InputError, OSError), match=r"choose another folder|read back"):
        worker(make_plan())


def test_a_file_in_the_folders_place(make_plan, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="Not a directory"):
        Folder(tmp_path / "out", "png").check(make_plan())


def _cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a picture cut short": ("000001/000007.png", _cut, "is damaged"),
    "a bit of a picture": ("000001/000007.png", _flip, "is damaged"),
    "a picture gone": ("000001/000007.png", lambda path: path.unlink(), "is damaged"),
    "one too many": ("000001/extra.png", lambda path: path.write_bytes(b""), "is damaged"),
    "a shard gone": ("000001", shutil.rmtree, "000001 is missing"),
    "a damaged JSON file": ("shards/000001.json", _cut, "its JSON file is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_drawn_again(make_plan, worker, tmp_path, records, damage):
    plan = make_plan()
    drawing = worker(plan)
    drawing.work()
    before, folder = records(tmp_path / "out"), drawing.folder
    assert [folder.verify(shard) for shard in plan.shards] == [None] * 4 and folder.is_complete(plan)
    name, do, message = DAMAGES[damage]
    do(tmp_path / "out" / name)
    assert [folder.verify(shard) is None for shard in plan.shards] == [True, False, True, True]
    assert message in folder.verify(plan.shards[1])
    assert folder.is_done(plan.shards[1]) == (damage in ("a bit of a picture", "one too many"))  # their sizes are right
    folder.forget(plan.shards[1])
    worker(plan).work()
    assert records(tmp_path / "out") == before and folder.verify(plan.shards[1]) is None


def test_differences_are_named():
    ours, theirs = {"torch": "2.13", "CUDA": None, "same": 1}, {"torch": "2.12", "CUDA": "13.0", "same": 1}
    assert differences(ours, theirs) == ["torch 2.13, not 2.12", "CUDA none, not 13.0"]

"""`fastdiff bulk` and `fastdiff status`: what they say before anything is drawn, and of what is done."""

import json
import shutil

import pytest

from fastdiff.cli import main


@pytest.fixture
def finished(tmp_path, monkeypatch, make_plan, worker):
    """A run of 20 pictures that is done, and the command that drew it."""
    plan = make_plan()
    worker(plan).work()
    monkeypatch.chdir(tmp_path)
    flags = ["--steps", "2", "--num-images", "20", "--shard-size", "6", "--dtype", "float32", "--device", "cpu"]
    return ["bulk", "-m", plan.run.request.model, *flags, "--out", "out"]


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_all_done(finished, capsys):
    assert said(capsys, *finished) == (0, "", "fastdiff: all 4 shards in out are done\n")


def test_what_is_gone_or_damaged_is_told_and_would_be_drawn_again(finished, capsys, tmp_path, monkeypatch):
    launched = []
    monkeypatch.setattr("fastdiff.bulk.launching.launch", lambda *args: launched.append(args))
    shutil.rmtree(tmp_path / "out/000001")
    path = tmp_path / "out/000002/000013.png"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, _, err = said(capsys, *finished)
    assert "shard 000001: its files are gone, or not of their size; it is drawn again" in err and "000002" not in err
    assert len(launched) == 1 and "12 of 20" not in err and "14 of 20 pictures are in out" in err
    assert "shard 000002: 000002 is not what was written; it is drawn again" in said(capsys, *finished, "--verify")[2]
    assert launched[-1][0] == [*finished[1:], "--verify"] and code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "3"], "this one has steps 3, not 2; name another folder"),
        (["--seed", "random"], "seed random: a run again would draw others"),
        (["--workers", "0"], "0 is not a whole number of at least 1"),
        (["--format", "jpg"], "invalid choice: 'jpg'"),
        (["--label", "a"], "has no labels"),
        (["--spec", "no.csv"], "spec no.csv does not exist"),
    ],
)
def test_refusals(finished, capsys, flags, message):
    code, out, err = said(capsys, *finished, *flags)
    assert (code, out) == (2, "") and err.startswith("fastdiff: error: ") and message in err and err.count("\n") == 1


def test_status(finished, capsys, tmp_path):
    assert said(capsys, "status", "out") == (0, "20 of 20 pictures, 4 of 4 shards\n", "")
    (tmp_path / "out/shards/000003.json").unlink()
    lease = {"host": "another", "pid": 7, "start": "5", "token": "t", "drawn": 1}
    (tmp_path / "out/shards/000003.lease-1").write_text(json.dumps(lease))
    (tmp_path / "out/shards/000002.json").unlink()
    (tmp_path / "out/shards/000002.error.json").write_text('{"failures": ["NaN", "NaN in it"]}')
    code, out, _ = said(capsys, "status", "out")
    lines = out.splitlines()
    assert code == 0 and lines[:2] == ["12 of 20 pictures, 2 of 4 shards", "1 under way, by another:7"]
    assert "pictures/s, " in lines[2] and lines[3] == "000002 was given up: NaN in it"
    found = json.loads(said(capsys, "status", "out", "--json")[1])
    assert (found["drawn"], found["in_hand"], found["given_up"]) == (12, 1, {"000002": "NaN in it"})


def test_status_of_no_run(capsys, tmp_path):
    code, _, err = said(capsys, "status", str(tmp_path))
    assert code == 2 and "holds no plan.json of a bulk run; name the folder" in err

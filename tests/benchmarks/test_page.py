"""The benchmark of the page with two users and tiny models."""

import os
import subprocess

import pytest

from fastdiff.cli import main
from tests.support.tiny import UNET, save_unet


@pytest.fixture
def bench(load, monkeypatch):
    """The script, which draws its expected pictures in this process."""
    bench = load("bench_page")
    for name, value in {"USERS": 2, "PICTURES": 1, "STEPS": 2, "QUEUING": 0.2}.items():
        monkeypatch.setattr(bench, name, value)

    def run(command, cwd, **options):
        monkeypatch.chdir(cwd)
        assert command[1:3] == ["-m", "fastdiff"] and main(command[3:]) == 0

    monkeypatch.setattr(subprocess, "run", run)
    return bench


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="ends the server by a POSIX signal")
def test_two_users_of_two_models_behind_one_who_cancels(bench, text_folder, tmp_path):
    (row,) = bench.rows([save_unet(tmp_path / "labels", **UNET, num_class_embeds=3), text_folder("sd1")])
    assert row["users"] == 2 and row["pictures_s"] > 0 and row["workload"].startswith("./labels ./sd1")
    assert row["first_s"] > 0 and 0 <= row["cancel_s"] < 5 and 0 < row["next_s"] < 10
    assert 0 < row["wait_s"] <= row["longest_s"]
    assert row["wrong"] == 0


def test_a_picture_that_is_another_or_not_there_is_wrong(bench):
    drawn = [bench.Drawn(0.0, 1.0, 2.0, [("a-0.png", b"x")]), bench.Drawn(0.0, 1.0, 2.0, [])]
    assert bench.count_wrong(drawn, {"a-0.png": b"x"}) == 1
    assert bench.count_wrong(drawn, {"a-0.png": b"y"}) == 2

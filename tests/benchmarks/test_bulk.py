"""The benchmark of bulk runs with tiny models."""

import json
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.support.tiny import UNET, save_unet


@pytest.fixture
def bench(load, monkeypatch, tmp_path):
    """The script with a tiny ddpm32, and a tiny emoji64 with two labels and a null label."""
    bench = load("bench_bulk")
    folders = {
        "ddpm32": save_unet(tmp_path / "ddpm32", **UNET),
        "emoji64": save_unet(tmp_path / "emoji64", **UNET, num_class_embeds=3),
    }
    tasks = {"ddpm32": bench.TASKS["ddpm32"], "emoji64": bench.TASKS["emoji64"]}
    tasks["ddpm32"] = bench.TASKS["ddpm32"].__class__(pictures=24, batch=4, steps=2)
    tasks["emoji64"] = bench.TASKS["ddpm32"].__class__(pictures=4, batch=4, steps=2, guidance=2.0, labels=2)
    monkeypatch.setattr(bench, "TASKS", tasks)
    monkeypatch.setattr(load("bulk_loops"), "TASKS", tasks)
    monkeypatch.setattr(bench, "folder_of", lambda name, root: folders[name])
    return bench


@pytest.fixture
def loops(load, capsys):
    """Run the loop over diffusers in this process instead of under torchrun."""

    state = SimpleNamespace(device=torch.device("cpu"), process_index=0, split_between_processes=nullcontext)

    def run(command, **options):
        _, *arguments = command[command.index("1") + 1 :]
        load("bulk_loops").run(state, *arguments)
        return SimpleNamespace(stdout=capsys.readouterr().out)

    return run


@pytest.mark.slow
def test_ours(bench):
    (row,) = bench.rows(["ddpm32-fastdiff-1"])
    assert row["workload"] == "ddpm32-fastdiff-1" and row["pictures"] == 24 and row["pictures_s"] > 0
    assert row["busy"] is None and 0 < row["first_s"] < row["wall_s"]


@pytest.mark.parametrize("name", [pytest.param("ddpm32", marks=pytest.mark.slow), "emoji64"])
def test_loops(bench, loops, monkeypatch, name):
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(subprocess, "run", loops)
    (row,) = bench.rows([f"{name}-eager-1"])
    assert row["pictures"] == 12 and row["pictures_s"] > 0


def test_numbers(bench, monkeypatch, tmp_path):
    """The rates only count work after the last worker's first shard."""

    def run(command, **options):
        lines = [{"rank": rank, "count": 4, "at": at} for rank in (0, 1) for at in (1.0, 2.0 + rank, 6.0, 10.0)]
        return SimpleNamespace(stdout="\n".join(["a line of torchrun", *map(json.dumps, lines)]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bench, "loop", lambda *args, real=bench.loop: real(*args[:2], 2, *args[3:]))
    rows = list(bench.rows(["ddpm32-compile-1", "ddpm32-compile-2"]))
    assert rows[0]["pictures_s"] == pytest.approx(8 / 8 + 8 / 7) and rows[0]["pictures"] == 32
    assert rows[1]["of_linear"] == pytest.approx(0.5)

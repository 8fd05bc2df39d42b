"""The benchmark of pictures in, on tiny models on the CPU."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
FAR = float("inf")


@pytest.fixture
def bench(load, monkeypatch):
    bench, configs, pipelines = load("bench_pictures_in"), load("stable_diffusion"), load("pipelines")
    for name, config in pipelines.TINY.items():
        monkeypatch.setattr(configs, name, getattr(configs, name) | config)
    monkeypatch.setattr(load("text_folders"), "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench, "GPU", False)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(pipelines, "compile_diffusers", lambda model: model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other at every tiny operation on busy cores
    yield bench
    torch.set_num_threads(threads)


@pytest.fixture
def calls(bench, monkeypatch):
    """Return the numbers of calls of diffusers' eager U-Net, for each picture that it draws."""
    counts, of_diffusers = [], bench.WAYS["eager"]

    def counted(pipe):
        theirs = of_diffusers(pipe)
        theirs.text_to_image.unet.register_forward_hook(lambda *_: counts.append(counts.pop() + 1))
        return theirs

    def draw(workload):
        return lambda *given: counts.append(0) or workload.theirs(*given)

    monkeypatch.setitem(bench.WAYS, "eager", counted)
    return SimpleNamespace(counts=counts, of=lambda workload: dataclasses.replace(workload, theirs=draw(workload)))


WORKLOADS = (
    "sdxl-inpainting",
    pytest.param("sd15-image-to-image-b4", marks=pytest.mark.slow),
    pytest.param("sd15-hires-1536", marks=pytest.mark.slow),
    pytest.param("sd15-prompt-to-png", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_workload_draws_the_same_in_each_way(bench, calls, monkeypatch, workload):
    counted = calls.of(bench.WORKLOADS[workload])
    monkeypatch.setitem(bench.WORKLOADS, workload, counted)
    monkeypatch.delitem(bench.WAYS, "compile")
    (row,) = bench.rows([workload], "float32", FAR, tiny=True)
    assert row["fastdiff_err"] < 1e-4
    assert row["eager_s"] > 0 and row["fastdiff_s"] > 0
    assert row["steps"] == bench.TINY_STEPS and row["run"] == counted.run(bench.TINY_STEPS)
    assert {*calls.counts} == {counted.run(bench.TINY_STEPS), counted.run(2)}
    json.dumps(row)


def test_another_picture_has_no_times(bench, monkeypatch):
    right = bench.WORKLOADS["sd15-prompt-to-png"]

    def wrong(pipe, size, given):
        return right.ours(pipe, size, {**given, "generator": torch.Generator().manual_seed(1)})

    monkeypatch.setitem(bench.WORKLOADS, "sd15-prompt-to-png", dataclasses.replace(right, ours=wrong))
    (row,) = bench.rows(["sd15-prompt-to-png"], "float32", time.monotonic() + 60, tiny=True)
    assert row["failure"] == "fastdiff does not draw diffusers' picture" and row["fastdiff_err"] > 1
    assert row["compile_failure"] == "no time" and "fastdiff_s" not in row


def test_a_way_that_fails_leaves_the_others(bench, monkeypatch):
    def failing(pipe):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setitem(bench.WAYS, "compile", failing)
    (row,) = bench.rows(["sd15-prompt-to-png"], "float32", FAR, tiny=True)
    assert row["compile_failure"] == "OutOfMemoryError: no memory" and "compile_s" not in row
    assert {"fastdiff_s", "fastdiff_step_ms", "eager_s", "eager_step_ms"} <= row.keys()


def test_nothing_begins_after_the_end(bench, capsys):
    assert list(bench.rows([*bench.WORKLOADS], "bfloat16", time.monotonic() - 1, tiny=True)) == []
    assert capsys.readouterr().out.splitlines() == [f"no time for {name}" for name in bench.WORKLOADS]


def test_the_ways_take_turns_and_a_step_is_a_difference(bench, monkeypatch):
    drawn, now = [], [0.0]

    def call(who, steps):
        drawn.append((who, steps))
        now[0] += {"eager": 1.0, "fastdiff": 0.5}[who] + {"eager": 0.3, "fastdiff": 0.1}[who] * steps

    monkeypatch.setattr(bench, "ROUNDS", 3)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    pipe = SimpleNamespace(unet=SimpleNamespace(config=SimpleNamespace(sample_size=64)), vae_scale_factor=8)
    compared = bench.Comparison(bench.WORKLOADS["sd15-hires-1536"], pipe, 50, FAR)
    compared.ways, compared.call = {"eager": None, "fastdiff": None}, call
    times = compared.turns()
    assert (times["eager_s"], times["fastdiff_s"], times["run"]) == pytest.approx((16.0, 5.5, 75))
    assert (times["eager_step_ms"], times["fastdiff_step_ms"]) == pytest.approx((200.0, 66.7), abs=0.1)
    turns = [("eager", 50), ("eager", 10), ("fastdiff", 50), ("fastdiff", 10)]
    assert drawn == turns + turns[2:] + turns[:2] + turns

"""The benchmark of ControlNets, on tiny models on the CPU."""

import dataclasses
import json

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
FAR = float("inf")


@pytest.fixture
def bench(load, monkeypatch):
    bench, configs, pipelines = load("bench_control"), load("stable_diffusion"), load("pipelines")
    for name, config in pipelines.TINY.items():
        monkeypatch.setattr(configs, name, getattr(configs, name) | config)
    for module in ("text_folders", "control_pipelines"):
        monkeypatch.setattr(load(module), "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(load("bench_pictures_in"), "GPU", False)
    monkeypatch.setattr(load("bench_pictures_in"), "ROUNDS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other at every tiny operation on busy cores
    yield bench
    torch.set_num_threads(threads)


def rows(bench, load, workload, names=("eager", "accelerate", "fastdiff")):
    ways = {name: load("control_pipelines").WAYS[name] for name in names}
    found = load("bench_pictures_in").rows([workload], "float32", FAR, tiny=True, workloads=bench.WORKLOADS, ways=ways)
    return [*found]


@pytest.mark.parametrize(
    "workload", [pytest.param("sdxl-one-controlnet", marks=pytest.mark.slow), "sd15-two-controlnets"]
)
def test_each_workload_draws_the_same_in_each_way(bench, load, workload):
    (row,) = rows(bench, load, workload)
    assert row["fastdiff_err"] < 1e-4 and row["accelerate_err"] < 1e-4
    assert row["eager_s"] > 0 and row["fastdiff_s"] > 0 and row["accelerate_s"] > 0
    json.dumps(row)


def test_the_ways_run_what_they_are_called(load, bench):
    ways = load("control_pipelines").WAYS
    pipe = load("pipelines").random_pipeline("sd15-two-controls", torch.float32)
    eager, accelerated, ours = (ways[name](pipe) for name in ("eager", "accelerate", "fastdiff"))
    assert "forward" not in vars(eager.unet) and len(ours.controlnets) == 2
    assert all("forward" in vars(part) for part in (accelerated.unet, *accelerated.controlnet.nets))


def test_the_controlnets_have_an_effect(bench, load, monkeypatch):
    right = bench.WORKLOADS["sd15-two-controlnets"]

    def off(pipe, size, given):
        return right.ours(pipe, size, {**given, "control_guidance_end": 0.1})

    def call(pipe, size, given):
        return (off if isinstance(pipe, load("pipelines").fastdiff.TextToImagePipeline) else right.ours)(
            pipe, size, given
        )

    monkeypatch.setitem(bench.WORKLOADS, "sd15-two-controlnets", dataclasses.replace(right, ours=call))
    (row,) = rows(bench, load, "sd15-two-controlnets", ("eager", "fastdiff"))
    assert row["failure"] == "fastdiff does not draw diffusers' picture" and "fastdiff_s" not in row

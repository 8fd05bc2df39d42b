"""The benchmark of the server: its loads, and the server that draws with diffusers."""

import io
import json
import random
from itertools import pairwise

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.waiting import TIMEOUT

pytestmark = pytest.mark.usefixtures("one_thread")
BODY = {"prompt": "a cat", "size": "16x16", "num_inference_steps": 3, "guidance_scale": 5.0}


@pytest.fixture
def folder(text_folder):
    return str(text_folder("sd1"))


@pytest.fixture
def address(load, folder):
    """A server that draws with diffusers."""
    server = load("diffusers_server")
    with server.serving(server.studio_of(folder, eager=True)) as running:
        running.studio.load()
        running.studio.loaded.result(TIMEOUT)
        yield running.address


@pytest.fixture
def loads(load):
    return load("load")


def test_the_server_draws_what_diffusers_draws(address, loads, folder):
    (answer,) = loads.one_by_one(address, [BODY | {"seed": 7}])
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    latents = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(7))
    given = {"num_inference_steps": 3, "guidance_scale": 5.0, "latents": latents}
    expected = np.array(pipe("a cat", **given).images[0])
    drawn = np.array(Image.open(io.BytesIO(answer.picture)))
    assert answer.status == 200 and np.abs(drawn.astype(int) - expected).max() <= 1  # channels-last rounds otherwise


def test_its_stream_has_partial_pictures(address, loads):
    stream, whole = loads.one_by_one(address, [BODY | {"stream": True, "partial_images": 1}, BODY])
    assert stream.asked < stream.first < stream.done and stream.picture == whole.picture


def test_clients_that_begin_one_after_the_other_ask_until_the_end(address, loads):
    begin, end, answers = loads.steady_loop(address, lambda number: BODY | {"seed": number}, 2, 0.8, 0.4)
    assert end == begin + 0.4 and {each.status for each in answers} == {200}
    assert [each.body["seed"] for each in answers] == [*range(len(answers))]  # one picture at a time
    alone = [each for each in answers if each.asked < begin - 0.4]  # the second client has not begun
    assert all(after.asked >= before.done for before, after in pairwise(alone))
    assert loads.rate_of(answers, begin, end) > 0


def test_the_rate_counts_whole_bursts(loads):
    answers = [loads.Answer({}, 0, done, done, 200) for done in (0.1, 0.1, 0.9, 0.9, 1.9, 1.9, 2.9, 2.9, 3.1, 3.1)]
    assert loads.rate_of(answers, 1.0, 3.0) == pytest.approx(2.0)
    with pytest.raises(SystemExit, match="--seconds"):
        loads.rate_of(answers, 4.0, 5.0)


def test_random_arrivals_are_bounded_in_count_and_in_patience(address, loads):
    def asked(**limits):
        return loads.poisson(address, lambda number: BODY, 1e4, 1.0, random.Random(0), **limits)

    assert [each.status for each in asked(most=3, patience=TIMEOUT)] == [200] * 3
    late = asked(most=3, patience=0.0)
    assert [each.status for each in late] == [loads.LATE] * 3


def test_the_pipeline_alone_is_measured(load, loads, folder, capsys):
    alone, clock = load("pipeline_alone"), load("clock").Clock()
    found = alone.measure_new(loads.Workload(steps=1), folder, None, clock)
    assert found["pipeline_s"] > 0 and found["pipeline_batch"] == 1 and found["pipeline_ms"] > 0
    assert "pipeline: loaded" in capsys.readouterr().err


def test_random_weights_are_saved_once(load, loads, tmp_path, monkeypatch):
    alone, saved = load("pipeline_alone"), []
    monkeypatch.setattr(alone, "measure", lambda workload, model, clock: model)

    def save(name, folder):
        saved.append(name)
        folder.mkdir(parents=True)
        (folder / "model_index.json").touch()

    monkeypatch.setattr(alone, "save", save)
    place = tmp_path / "sd15"
    for _ in range(2):
        assert alone.measure_new(loads.Workload(), "sd15", place, load("clock").Clock()) == str(place)
    assert saved == ["sd15"]


@pytest.mark.slow
@pytest.mark.parametrize("server", ["shared", "diffusers-eager"])
def test_a_row(load, monkeypatch, folder, server, capsys):
    bench = load("bench_serve")
    monkeypatch.setitem(bench.WORKLOADS, folder, bench.Workload(rounds=1))
    flags = ["--server", server, "--seconds", "1", "--loads", "50", "--steps", "2", "--clients", "2"]
    monkeypatch.setattr("sys.argv", ["bench_serve", folder, *flags])
    bench.main()
    said = capsys.readouterr()
    assert f"{server}: ready" in said.err
    (row,) = json.loads(said.out.splitlines()[-1])
    assert row["server"] == server and row["steps"] == 2 and row["clients"] == 2
    assert all(row[key] > 0 for key in ("pipeline_s", "one_ms", "partial_ms", "capacity_s", "share", "p99_50"))

"""From options to a run: invalid options are refused before drawing, missing ones get defaults."""

import secrets

import pytest

from fastdiff.errors import InputError
from fastdiff.kinds import MAX_SEED
from fastdiff.pipelines import Pipeline
from fastdiff.ui.drawing import prepare
from fastdiff.ui.parts.request import Limits, UncheckedRequest

LIMITS = Limits(pictures=4, steps=50, side=128, batch_size=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"steps": 0}, "steps: 0 is not a whole number from 1 to 50", id="no steps"),
        pytest.param({"steps": -1}, "steps: -1 is not a whole number", id="negative"),
        pytest.param({"steps": 10**9}, "steps: 1000000000 is not a whole number", id="beyond the limit"),
        pytest.param({"steps": 2.5}, "steps: 2.5 is not a whole number", id="fraction"),
        pytest.param({"steps": float("nan")}, "steps: nan is not a whole number", id="NaN"),
        pytest.param({"steps": True}, "steps: True is not a whole number", id="true is no number"),
        pytest.param({"steps": "abc"}, "steps: 'abc' is not a whole number", id="text"),
        pytest.param({"seed": -2}, f"seed: -2 is not a whole number from 0 to {MAX_SEED}, or -1", id="seed below -1"),
        pytest.param({"seed": False}, "seed: False is not", id="false is no seed"),
        pytest.param({"seed": 2**32}, "seed: 4294967296 is not", id="seed over 32 bits is not wrapped"),
        pytest.param({"seed": 2**63}, "seed: 9223372036854775808 is not", id="seed over 63 bits"),
        pytest.param({"seed": "1e3"}, "seed: '1e3' is not", id="seed as text"),
        pytest.param({"seed": [1, 2]}, r"seed: \[1, 2\] is not", id="seed list"),
        pytest.param({"seed": MAX_SEED, "num_images": 2}, "would exceed the last seed", id="seeds past the end"),
        pytest.param({"num_images": 5}, "num_images: 5 is not a whole number from 1 to 4", id="too many pictures"),
        pytest.param({"num_images": 10**6}, "num_images: 1000000 is not", id="a million pictures"),
        pytest.param({"batch_size": 0}, "batch_size: 0 is not", id="empty batch"),
        pytest.param({"width": 7}, "height 64, width 7: both must be multiples of 8", id="width 7"),
        pytest.param({"width": 0}, "width: 0 is not", id="width 0"),
        pytest.param({"width": 10**6}, "width: 1000000 is not a whole number from 1 to 128", id="width of a million"),
        pytest.param({"height": 72, "width": 71}, "height 72, width 71: both must be", id="one side is wrong"),
        pytest.param({"model": "/etc"}, "model '/etc' is unknown; choose one of emoji-sd", id="path as model"),
        pytest.param({"model": "../models/cats"}, "is unknown", id="path out of the models folder"),
        pytest.param({"model": "google/ddpm"}, "hub ids need the server option --allow-hub", id="hub is off"),
        pytest.param({"model": ["emoji64"]}, "is not a name", id="list as model"),
        pytest.param({"model": "x" * 10**6}, r"model: 'x{40}.* is not a name of up to 200", id="long model"),
        pytest.param({"label": "nto animals"}, "did you mean noto animals", id="unknown label"),
        pytest.param({"label": "x" * 10**6}, r"label: 'x{40}.* a name of up to 200", id="label of 1 MB"),
        pytest.param({"label": "\n" * 100}, "is not a label of this model", id="line breaks as label"),
        pytest.param({"label": "\0"}, "is not a label of this model", id="NUL as label"),
        pytest.param({"label": "\ud800"}, "is not a whole number", id="lone surrogate as label"),
        pytest.param({"label": "<script>{}%s"}, "is not a label of this model", id="markup as label"),
        pytest.param({"label": "noto animals\nSteps: 1, Seed: 9"}, "is not a label", id="settings in a label"),
        pytest.param({"label": 10_000}, "out of range", id="label index past the end"),
        pytest.param({"label": 1.5}, "label: 1.5 is not a whole number", id="fraction as label"),
        pytest.param({"model": "./plain/tiny", "label": 0}, "has no labels; leave it out", id="label without labels"),
        pytest.param({"model": "./plain/tiny", "guidance_scale": 2}, "no null label", id="guidance without labels"),
        pytest.param({"model": "./text/sd1"}, "prompt: ./text/sd1 needs a prompt", id="no prompt"),
        pytest.param({"model": "./text/sd1", "prompt": 7}, "prompt: 7 is not a string of up to", id="number as prompt"),
        pytest.param({"model": "./text/sd1", "prompt": "x" * 10_001}, "prompt: .* 10000 characters", id="long prompt"),
        pytest.param({"model": "./text/sd1", "prompt": "a", "clip_skip": 9}, "clip-skip 9: the text", id="clip skip"),
        pytest.param({"prompt": "a cat", "label": "noto birds"}, "prompt: emoji64 has no text encoder", id="prompt"),
        pytest.param({"negative_prompt": "a"}, "negative-prompt: emoji64 has no text", id="negative prompt"),
        pytest.param({"precision": "fp4"}, "precision: 'fp4' is not one of full, int8, fp8", id="unknown precision"),
        pytest.param({"scheduler": "eular"}, "scheduler: 'eular' is not one of ddim, ddpm", id="unknown scheduler"),
        pytest.param({"scheduler": "ddpm", "eta": 0.5}, "eta 0.5 is an option of ddim", id="eta of DDPM"),
        pytest.param({"eta": float("inf")}, "eta: inf is not a number from 0 to 1", id="infinite eta"),
        pytest.param({"guidance_scale": "2"}, "cfg-scale: '2' is not a number", id="guidance as text"),
        pytest.param({"guidance_scale": float("nan")}, "cfg-scale: nan is not a number", id="guidance NaN"),
    ],
)
def test_refusals_name_the_field_and_the_remedy(shared, monkeypatch, options, message):
    monkeypatch.setattr(Pipeline, "from_card", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match=message) as refusal:
        prepare(UncheckedRequest(**options), shared, LIMITS)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_what_is_left_out_is_the_models_choice(shared):
    run = prepare(UncheckedRequest(), shared, LIMITS)
    request = run.request
    assert (request.num_inference_steps, request.scheduler, request.guidance_scale, request.eta) == (50, "ddim", 4.0, 0)
    assert [(picture.seed, picture.label_name) for picture in run.cells] == [(0, "fluent-3d hearts")]
    assert run.size == (64, 64)


def test_a_random_seed_is_picked_once_and_leaves_room_for_all_pictures(shared, monkeypatch):
    monkeypatch.setattr(secrets, "randbelow", lambda most: most - 1)
    for seed in (-1, None):
        run = prepare(UncheckedRequest(seed=seed, num_images=3), shared, LIMITS)
        assert [cell.seed for cell in run.cells] == [MAX_SEED - 2, MAX_SEED - 1, MAX_SEED]


def test_each_run_has_another_random_seed(shared):
    runs = [prepare(UncheckedRequest(seed=-1), shared, LIMITS) for _ in range(3)]
    assert len({run.cells[0].seed for run in runs}) > 1


def test_an_empty_prompt_is_one(shared):
    run = prepare(UncheckedRequest(model="./text/sd1", prompt=""), shared, LIMITS)
    assert [cell.prompt for cell in run.cells] == [""]
    assert (run.request.guidance_scale, run.request.num_inference_steps, run.request.scheduler) == (7.5, 50, "pndm")
    assert run.size == (16, 16)


def test_every_limited_field_is_an_option():
    with pytest.raises(InputError, match="height: 129"):
        prepare(UncheckedRequest(height=129), None, LIMITS)

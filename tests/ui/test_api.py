"""/generate and /models through Gradio's own client, as a program would call them."""

import json
import time

import numpy as np
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image

from fastdiff.models.unet2d import UNet2DModel
from fastdiff.pipelines import Pipeline
from fastdiff.requests import png


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    client = Client(server, verbose=False, download_files=tmp_path_factory.mktemp("downloads"))
    yield client
    client.close()


def test_pictures_are_the_pipelines_and_hold_their_settings(client):
    paths = client.predict(label="noto birds", seed=3, num_images=2, steps=2, api_name="/generate")
    expected = Pipeline.from_pretrained("emoji64", device="cpu")(
        num_inference_steps=2, num_images=2, seed=3, class_labels="noto birds"
    )
    assert len(paths) == 2
    for seed, path, image in zip((3, 4), paths, expected.images, strict=True):
        record = png.read_settings(path)
        assert (record["seed"], record["label"], record["model"]) == (seed, "noto birds", "emoji64")
        with Image.open(path) as drawn:
            assert np.array_equal(np.asarray(drawn), np.asarray(image))


def test_a_call_that_is_cancelled_keeps_what_is_finished(client, slow_steps):
    job = client.submit(num_images=20, steps=2, batch_size=1, api_name="/generate")
    told = set()
    while not any(job.outputs()):
        told |= {each.desc for each in job.status().progress_data or ()}
        time.sleep(0.01)
    assert told >= {"step 1 of 2"}
    assert job.cancel()
    steps = len(slow_steps)
    assert len(job.outputs()[-1]) >= 1
    time.sleep(1)
    assert len(slow_steps) <= steps + 1


def test_another_model_and_size(client):
    (path,) = client.predict(model="./plain/tiny", steps=1, width=24, height=16, api_name="/generate")
    with Image.open(path) as picture:
        assert picture.size == (24, 16)


def test_prompts(client):
    options = {"negative_prompt": "ocean", "clip_skip": 1, "steps": 2, "seed": 5}
    (path,) = client.predict(model="./text/sd1", prompt="the cat", **options, api_name="/generate")
    record = png.read_settings(path)
    assert record | {"model": "./text/sd1", "prompt": "the cat", "num_inference_steps": 2} == record
    assert record | {key: options[key] for key in ("negative_prompt", "clip_skip", "seed")} == record


def test_models(client):
    found = {each["name"]: each for each in client.predict(api_name="/models")}
    assert list(found) == ["emoji64", "emoji64-dit", "./cats", "./plain/tiny", "./text/sd1", "./text/sdxl"]
    assert [name for name, each in found.items() if each["reads_text"]] == ["./text/sd1", "./text/sdxl"]
    assert found["emoji64"]["size"] == [64, 64]
    assert "noto birds" in found["emoji64"]["labels"]
    assert found["emoji64"]["label_groups"]["noto smileys"][0] == "noto hearts"
    assert found["emoji64"]["steps"] == 20
    assert found["./plain/tiny"] == {
        "name": "./plain/tiny",
        "size": [16, 16],
        "labels": [],
        "reads_text": False,
        "label_groups": {},
        "steps": 20,
        "scheduler": "ddpm",
        "guidance_scale": None,
    }


def test_the_api_page_names_two_functions(client):
    described = client.view_api(return_format="dict")["named_endpoints"]
    assert sorted(described) == ["/generate", "/models"]
    names = [parameter["parameter_name"] for parameter in described["/generate"]["parameters"]]
    assert names[:5] == ["model", "label", "seed", "num_images", "steps"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"steps": True}, "steps: True is not a whole number", id="true"),
        pytest.param({"steps": 2.5}, "steps: 2.5 is not a whole number", id="fraction"),
        pytest.param({"seed": -1}, "seed: -1 is not a whole number", id="seed"),
        pytest.param({"label": "<b>x"}, "label '<b>x' is not a label", id="label"),
        pytest.param({"model": "/etc"}, "model '/etc' is not here", id="model"),
        pytest.param({"prompt": "a cat"}, "prompt: emoji64 has no text encoder", id="prompt of a class model"),
        pytest.param({"model": "./text/sd1"}, "./text/sd1 draws from a text; give one", id="no prompt"),
        pytest.param({"model": "./text/sd1", "prompt": "a", "label": 1}, "label 1: .* leave it out", id="label"),
        pytest.param({"width": 7}, "height 64, width 7", id="size"),
    ],
)
def test_refusals(client, options, message):
    with pytest.raises(AppError, match=message):
        client.predict(**options, api_name="/generate")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_in_json(visit, number):
    page = visit()
    body = json.dumps({"data": ["emoji64", None, 0, 1, "?", *[None] * 9]}).replace('"?"', number)
    reply = page.http.post("/gradio_api/call/generate", content=body, headers={"content-type": "application/json"})
    if reply.status_code == 200:
        result = page.http.get(f"/gradio_api/call/generate/{reply.json()['event_id']}").text
        assert "is not a whole number from 1 to 1000" in result
    else:
        assert reply.status_code == 422


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(MemoryError(), "out of memory: choose smaller pictures", id="out of memory"),
        pytest.param(OSError(28, "No space left on device"), "No space left on device", id="disk full"),
        pytest.param(ZeroDivisionError("our own mistake"), "error", id="a bug names no secrets"),
    ],
)
def test_the_queue_goes_on_after_a_failure(client, monkeypatch, error, message):
    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(UNet2DModel, "predict", fail)
        with pytest.raises(AppError, match=message) as refusal:
            client.predict(steps=1, api_name="/generate")
        assert "our own mistake" not in str(refusal.value)
    assert len(client.predict(steps=1, api_name="/generate")) == 1

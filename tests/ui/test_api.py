"""/generate and /models, called with Gradio's own client."""

import asyncio
import json
import re
import secrets
from dataclasses import fields
from pathlib import Path

import httpx
import numpy as np
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from fastdiff.cli import main
from fastdiff.diffusion.loop import Loop
from fastdiff.kinds import MAX_SEED
from fastdiff.pipelines import Pipeline
from fastdiff.requests import defaults, png
from fastdiff.sampler_names import SCHEDULERS
from fastdiff.ui.page import build_page
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.serving.store import Store
from tests.support.waiting import wait_for
from tests.ui.inputs.conftest import png_file


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


def test_a_call_that_is_cancelled_keeps_what_is_finished(client, shared, slow_steps):
    slow_steps.seconds = 100
    job = client.submit(num_images=20, steps=2, batch_size=1, api_name="/generate")
    slow_steps.turns.release()
    wait_for(lambda: "step 1 of 2" in {each.desc for each in job.status().progress_data or ()})
    slow_steps.turns.release()
    wait_for(lambda: any(job.outputs()))
    (running,) = shared.queue._running
    assert job.cancel()
    wait_for(lambda: running.has_ended)
    assert len(job.outputs()[-1]) == 1
    slow_steps.turns.release(100)
    wait_for(lambda: not shared.queue.is_drawing)
    assert len(slow_steps) <= 4, "a run ends after the step that is reported next: a tenth of a second, or a picture"


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


def test_a_start_picture(client, tmp_path):
    path = tmp_path / "apple.png"
    path.write_bytes(png_file())
    options = {"model": "./text/sd1", "prompt": "the cat", "steps": 5, "seed": 5, "prompt_syntax": "weighted"}
    (drawn,) = client.predict(**options, init_image=handle_file(path), strength=0.4, api_name="/generate")
    record = png.read_settings(drawn)
    assert record | {"init_image": "apple.png", "strength": 0.4, "width": 64, "height": 48} == record
    assert png.read_input(drawn, "init-image") == path.read_bytes()
    path.write_bytes(b"no picture")
    with pytest.raises(AppError, match=r"^init_image 'apple.png' is not a picture that PIL reads"):
        client.predict(**options, init_image=handle_file(path), api_name="/generate")
    for value in (drawn, "/etc/passwd", 7):
        with pytest.raises(AppError, match=r"init_image: (this file was not uploaded|drop a PNG)"):
            client.predict(**options, init_image=value, api_name="/generate")


def test_a_controlnet(client, tmp_path, as_bundled):
    path = tmp_path / "apple.png"
    path.write_bytes(png_file())
    options = {"model": "emoji-sd", "prompt": "a cat", "steps": 1, "control": "emoji-edges", "api_name": "/generate"}
    own = {"control_image": handle_file(path), "control_preprocessor": "canny", "control_scale": 0.5}
    with as_bundled():
        (drawn,) = client.predict(**options, **own)
    record = png.read_settings(drawn)
    assert record | {"control": ["emoji-edges"], "control_scale": [0.5], "width": 64, "height": 48} == record
    with pytest.raises(AppError, match="control_image: the ControlNet reads a picture"):
        client.predict(**options)


def test_an_ip_adapter(client, tmp_path):
    path = tmp_path / "apple.png"
    path.write_bytes(png_file())
    options = {"model": "emoji-sd", "prompt": "a cat", "api_name": "/generate"}
    with pytest.raises(AppError, match="ip_adapter_scale: it is for an IP-Adapter; choose one"):
        client.predict(**options, ip_adapter_scale=0.5)
    for image, message in ((None, "ip_adapter_image: the IP-Adapter reads a picture"), (path, "'x' is not on offer")):
        with pytest.raises(AppError, match=message):
            client.predict(**options, ip_adapter="x", ip_adapter_image=image and handle_file(image))


def test_weights_in_8_bits(client):
    (path,) = client.predict(model="./plain/tiny", steps=1, precision="int8", api_name="/generate")
    assert png.read_settings(path)["precision"] == "int8"


def test_models(client):
    found = {each["name"]: each for each in client.predict(api_name="/models")}
    assert list(found) == ["emoji-sd", "emoji64", "emoji64-dit", "./cats", "./plain/tiny", "./text/sd1", "./text/sdxl"]
    assert [name for name, each in found.items() if each["reads_text"]] == ["emoji-sd", "./text/sd1", "./text/sdxl"]
    assert found["emoji64"]["size"] == [64, 64]
    assert "noto birds" in found["emoji64"]["labels"]
    assert found["emoji64"]["label_groups"]["noto smileys"][0] == "noto hearts"
    assert found["emoji64"]["steps"] == 50
    assert found["./plain/tiny"] == {
        "name": "./plain/tiny",
        "size": [16, 16],
        "labels": [],
        "reads_text": False,
        "controlnets": [],
        "ip_adapters": [],
        "loras": [],
        "embeddings": [],
        "label_groups": {},
        "steps": 50,
        "scheduler": "ddpm",
        "guidance_scale": None,
    }


@pytest.mark.parametrize("seed", [-1, None])
def test_a_random_seed_stands_in_the_picture(client, seed, monkeypatch):
    monkeypatch.setattr(secrets, "randbelow", lambda most: most - 1)
    (path,) = client.predict(seed=seed, steps=1, api_name="/generate")
    assert png.read_settings(Path(path))["seed"] == MAX_SEED


def test_the_api_page_names_two_functions(client):
    described = client.view_api(return_format="dict")["named_endpoints"]
    assert sorted(described) == ["/generate", "/models"]
    names = [parameter["parameter_name"] for parameter in described["/generate"]["parameters"]]
    assert names[:5] == ["model", "label", "seed", "num_images", "steps"]


def test_every_parameter_has_a_description_and_every_number_its_range_and_default(client):
    described = client.view_api(return_format="dict")["named_endpoints"]
    parameters = [each for endpoint in described.values() for each in endpoint["parameters"]]
    assert len(parameters) == len(fields(UncheckedRequest))
    for each in parameters:
        said, name = each["python_type"]["description"], each["parameter_name"]
        assert re.fullmatch(r"[A-Z].+: .+\. Default: (?!None).+\.", said), name
        assert not re.fullmatch(r"(1st|2nd|3rd|\d+th)", each["label"]), name
        if {"int", "float"} & set(re.findall(r"\w+", each["python_type"]["type"])):
            assert re.search(r"number (from -?\d+ to \d+|of at least \d+)", said), name


def test_descriptions_have_the_page_s_limits_and_defaults(server, shared, tmp_path):
    limits = Limits(pictures=5, steps=70, side=96, batch_size=3)

    async def describe() -> dict:  # without an event loop, Gradio creates four and closes none
        page = build_page(shared, limits, Store(tmp_path))
        page.config = page.get_config_file()
        return page.get_api_info()["named_endpoints"]["/generate"]

    parameters = asyncio.run(describe())["parameters"]
    said = {each["parameter_name"]: each["python_type"]["description"] for each in parameters}
    for name, most in {"num_images": 5, "steps": 70, "width": 96, "height": 96, "batch_size": 3}.items():
        assert f"a whole number from 1 to {most}. Default: " in said[name]
    assert f"from 0 to {MAX_SEED}, or -1 for a random seed. Default: {defaults.SEED}." in said["seed"]
    assert f"else {defaults.STEPS}." in said["steps"]
    assert f"Default: {defaults.PAGE_ON_CPU.batch_size}." in said["batch_size"]
    assert f"one of {', '.join(SCHEDULERS)}." in said["scheduler"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"steps": True}, "steps: True is not a whole number", id="true"),
        pytest.param({"steps": 2.5}, "steps: 2.5 is not a whole number", id="fraction"),
        pytest.param({"seed": -2}, "seed: -2 is not a whole number", id="seed"),
        pytest.param({"label": "<b>x"}, "label '<b>x' is not a label.* the API's /models lists", id="label"),
        pytest.param({"model": "/etc"}, "model '/etc' is unknown", id="model"),
        pytest.param({"prompt": "a cat"}, "prompt: emoji64 has no text encoder", id="prompt of a class model"),
        pytest.param({"model": "./text/sd1"}, "./text/sd1 needs a prompt", id="no prompt"),
        pytest.param({"model": "./text/sd1", "prompt": "a", "label": 1}, "label 1: .* leave it out", id="label"),
        pytest.param(
            {"model": "./text/sd1", "prompt": "a" * 10001}, r"prompt: 'a+\.\.\. is not a string of up to", id="long"
        ),
        pytest.param({"width": 7}, "height 64, width 7", id="size"),
        pytest.param(
            {"model": "./text/sd1", "prompt": "a", "strength": 0.5},
            "strength 0.5: .* give init_image",
            id="strength alone",
        ),
        pytest.param({"guidance_stop": 2}, "guidance_stop: 2 is not a number from 0 to 1", id="interval"),
        pytest.param({"prompt_syntax": "x"}, "prompt_syntax: 'x' is not one of plain, weighted", id="syntax"),
    ],
)
def test_refusals(client, options, message):
    with pytest.raises(AppError, match=message):
        client.predict(**options, api_name="/generate")


DEFAULTS = ["emoji64", None, 0, 1, 1, *[None] * 31]
HUGE = 10**400  # not exact as a float


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


@pytest.mark.parametrize("count", [4, 11])
def test_values_that_may_be_null_can_be_left_out_at_the_end(http, count):
    data = ["emoji64", None, 0, 1, 1, *[None] * 6][:count]
    call = http.post("/gradio_api/call/generate", json={"data": data}).json()
    assert "event: complete" in http.get(f"/gradio_api/call/generate/{call['event_id']}").text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param([], "generate: 0 values are not enough; give 39, with null for each default: model", id="none"),
        pytest.param(["emoji64"], "generate: 1 values are not enough; give 39", id="one"),
        pytest.param([*DEFAULTS[:5], "ddim", HUGE, *DEFAULTS[7:]], "eta: 1000000", id="eta"),
        pytest.param([*DEFAULTS[:7], HUGE, *DEFAULTS[8:]], "guidance_scale: 1000000", id="guidance"),
        pytest.param([*DEFAULTS[:3], None, *DEFAULTS[4:]], "num_images is empty; give a whole number", id="no number"),
        pytest.param([*DEFAULTS[:5], "ddpm", 0.5, *DEFAULTS[7:]], "or give scheduler ddim", id="eta without ddim"),
        pytest.param(
            ["emoji64", {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}, *DEFAULTS[2:]],
            "label: a file is not allowed here",
            id="file",
        ),
    ],
)
def test_refusals_are_one_line(http, data, message):
    call = http.post("/gradio_api/call/generate", json={"data": data})
    (line,) = [line for line in http.get(f"/gradio_api/call/generate/{call.json()['event_id']}").text.splitlines() if
               line.startswith("data: ")]  # fmt: skip
    error = json.loads(line.removeprefix("data: "))["error"]
    assert message in error and "\n" not in error and "--" not in error and len(error) < 300


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        pytest.param("GET", "call/generate/nope", None, "job 'nope' is unknown", id="job"),
        pytest.param("GET", "queue/data?session_hash=nope", None, "this session has no jobs", id="visit"),
        pytest.param("POST", "call/nope", {"data": []}, "no such function; the API has /generate", id="function"),
        pytest.param("POST", "call/v2/nope", {}, "no such function; the API", id="function by names"),
        pytest.param("POST", "call/v2/generate", {"nope": 1}, "invalid call: Parameter `nope`", id="name"),
        pytest.param("POST", "queue/join", {"data": [], "fn_index": 999, "session_hash": "x"}, "no such", id="index"),
        pytest.param("POST", "run/generate", {"data": DEFAULTS}, "Please join the queue", id="past the queue"),
    ],
)
def test_whatever_is_not_there_is_one_line(http, method, path, body, message):
    reply = http.request(method, f"/gradio_api/{path}", json=body)
    assert message in reply.text and reply.text.strip().count("\n") == 0
    assert reply.status_code in (200, 400, 404)


def test_the_page_speaks_its_own_words(visit):
    page = visit()
    event = page.event("generate", "click")
    for field, value, message in (
        ("Pictures", None, "Pictures is empty; give a whole number"),
        ("Pictures", 33, "Pictures: 33 is not a whole number from 1 to 32"),
        ("Guidance", HUGE, "Guidance: 1000000"),
    ):
        result = page.call(event, page.inputs(event, **{field: value}))
        assert message in str(result["output"]), result


def test_settings_of_no_picture(visit):
    page = visit()
    uses = [each for each in page.config["dependencies"] if "use" in str(each["api_name"])]
    assert uses
    for event in uses:
        assert "no picture selected" in str(page.call(event, [None] * len(event["inputs"]))["output"])


def test_a_picture_of_the_command_drawn_again_has_the_same_bytes(visit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["--label", "noto birds", "--seed", "77", "--num-images", "1", "--steps", "2"]
    assert main(["sample", *settings, "--device", "cpu", "-o", "a.png"]) == 0
    page = visit()
    (uploaded,) = page.http.post("/gradio_api/upload", files={"files": ("a.png", Path("a.png").read_bytes())}).json()
    event = page.event("upload", "upload")
    file = {"path": uploaded, "orig_name": "a.png", "meta": {"_type": "gradio.FileData"}}
    updates = zip(event["outputs"], page.restore(file)["output"]["data"], strict=True)
    values = {key: each.get("value", ...) if isinstance(each, dict) else each for key, each in updates}
    restored = {key: value for key, value in values.items() if value is not ...}
    draw = page.event("generate", "click")
    data = [restored.get(key, value) for key, value in zip(draw["inputs"], page.inputs(draw, Pictures=1), strict=True)]
    page.call(draw, json.loads(json.dumps(data).replace(".0,", ",")))  # as browsers send numbers
    wait_for(lambda: "Drew 1 picture" in page.look())
    shown = page.call(page.event("history-tab", "select"), [None, 1])["output"]["data"]
    urls = re.findall(r"'url': '([^']*-77\.png)'", str(shown))
    assert page.http.get(urls[0]).content == Path("a.png").read_bytes()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_in_json(http, number):
    body = json.dumps({"data": ["emoji64", None, 0, 1, "?", *[None] * 9]}).replace('"?"', number)
    reply = http.post("/gradio_api/call/generate", content=body, headers={"content-type": "application/json"})
    if reply.status_code == 200:
        result = http.get(f"/gradio_api/call/generate/{reply.json()['event_id']}").text
        assert "is not a whole number from 1 to 1000" in result
    else:
        assert reply.status_code == 422


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(MemoryError(), "out of memory; reduce Width and Height", id="out of memory"),
        pytest.param(OSError(28, "No space left on device"), "No space left on device", id="disk full"),
        pytest.param(ZeroDivisionError("our own mistake"), "error", id="a bug names no secrets"),
    ],
)
def test_the_queue_goes_on_after_a_failure(client, monkeypatch, error, message):
    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step_by_picture", fail)
        with pytest.raises(AppError, match=message) as refusal:
            client.predict(steps=1, api_name="/generate")
        assert "our own mistake" not in str(refusal.value)
    assert len(client.predict(steps=1, api_name="/generate")) == 1

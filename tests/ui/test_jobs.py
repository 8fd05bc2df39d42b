"""From options to PNG files: what is refused, before anything is drawn, and what is drawn."""

import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff.errors import InputError, NonFiniteError
from fastdiff.models.unet2d import UNet2DModel
from fastdiff.pipeline import Pipeline
from fastdiff.requests import png
from fastdiff.requests.request import MAX_SEED
from fastdiff.ui import jobs
from fastdiff.ui.jobs import Options, draw, plan
from fastdiff.ui.limits import Limits

LIMITS = Limits(pictures=4, steps=50, side=128, batch_size=4)


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"steps": 0}, "steps 0: give a whole number from 1 to 50", id="no steps"),
        pytest.param({"steps": -1}, "steps -1: give a whole number", id="negative"),
        pytest.param({"steps": 10**9}, "steps 1000000000: give a whole number", id="beyond the limit"),
        pytest.param({"steps": 2.5}, "steps 2.5: give a whole number", id="fraction"),
        pytest.param({"steps": float("nan")}, "steps nan: give a whole number", id="NaN"),
        pytest.param({"steps": True}, "steps True: give a whole number", id="true is no number"),
        pytest.param({"steps": "abc"}, "steps abc: give a whole number", id="text"),
        pytest.param({"seed": -1}, f"seed -1: give a whole number from 0 to {MAX_SEED}", id="seed below 0"),
        pytest.param({"seed": 2**32}, "seed 4294967296: give", id="seed over 32 bits is not wrapped"),
        pytest.param({"seed": 2**63}, "seed 9223372036854775808: give", id="seed over 63 bits"),
        pytest.param({"seed": "1e3"}, "seed 1e3: give", id="seed as text"),
        pytest.param({"seed": [1, 2]}, r"seed \[1, 2\]: give", id="seed list"),
        pytest.param({"seed": None}, "seed None: give", id="empty seed field"),
        pytest.param({"seed": MAX_SEED, "num_images": 2}, "would pass the last seed", id="seeds past the end"),
        pytest.param({"num_images": 5}, "num_images 5: give a whole number from 1 to 4", id="too many pictures"),
        pytest.param({"num_images": 10**6}, "num_images 1000000: give", id="a million pictures"),
        pytest.param({"batch_size": 0}, "batch_size 0: give", id="empty batch"),
        pytest.param({"width": 7}, "height 64, width 7: this model draws multiples of 8", id="width 7"),
        pytest.param({"width": 0}, "width 0: give", id="width 0"),
        pytest.param({"width": 10**6}, "width 1000000: give a whole number from 1 to 128", id="width of a million"),
        pytest.param({"height": 72, "width": 71}, "height 72, width 71: this model draws", id="one side is wrong"),
        pytest.param({"model": "/etc"}, "model '/etc' is not here; choose one of emoji64", id="path as model"),
        pytest.param({"model": "../models/cats"}, "is not here", id="path out of the models folder"),
        pytest.param({"model": "google/ddpm"}, "hub ids need the server's option --allow-hub", id="hub is off"),
        pytest.param({"model": ["emoji64"]}, "is not here", id="list as model"),
        pytest.param({"model": "x" * 10**6}, r"model x{40}...: give a name of up to 200", id="long model"),
        pytest.param({"label": "nto animals"}, "did you mean noto animals", id="unknown label"),
        pytest.param({"label": "x" * 10**6}, r"label x{40}...: give a name of up to 200", id="label of 1 MB"),
        pytest.param({"label": "\n" * 100}, "is not a label of this model", id="line breaks as label"),
        pytest.param({"label": "\0"}, "is not a label of this model", id="NUL as label"),
        pytest.param({"label": "\ud800"}, "is not a label of this model", id="lone surrogate as label"),
        pytest.param({"label": "<script>{}%s"}, "is not a label of this model", id="markup as label"),
        pytest.param({"label": "noto animals\nSteps: 1, Seed: 9"}, "is not a label", id="settings in a label"),
        pytest.param({"label": 10_000}, "out of range", id="label index past the end"),
        pytest.param({"label": 1.5}, "give a label's name or index", id="fraction as label"),
        pytest.param({"model": "./plain/tiny", "label": 0}, "has no labels; leave it out", id="label without labels"),
        pytest.param({"model": "./plain/tiny", "guidance_scale": 2}, "no null label", id="guidance without labels"),
        pytest.param({"scheduler": "euler"}, "scheduler euler: give ddim or ddpm", id="unknown scheduler"),
        pytest.param({"scheduler": "ddpm", "eta": 0.5}, "eta 0.5 is an option of ddim", id="eta of DDPM"),
        pytest.param({"eta": float("inf")}, "eta inf: give a number from 0 to 1", id="infinite eta"),
        pytest.param({"guidance_scale": "2"}, "cfg-scale 2: give a number", id="guidance as text"),
        pytest.param({"guidance_scale": float("nan")}, "cfg-scale nan: give a number", id="guidance NaN"),
    ],
)
def test_refusals_name_the_field_and_the_remedy(models, monkeypatch, options, message):
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match=message) as refusal:
        plan(Options(**options), models, LIMITS)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_what_is_left_out_is_the_models_choice(models):
    job = plan(Options(), models, LIMITS)
    request = job.request
    assert (request.num_inference_steps, request.scheduler, request.guidance_scale, request.eta) == (20, "ddim", 4.0, 0)
    assert [(picture.seed, picture.label_name) for picture in job.pictures] == [(0, "fluent-3d hearts")]
    assert job.size == {"height": 64, "width": 64}


def test_the_labels_of_a_group_take_turns(models):
    job = plan(Options(label="noto smileys", seed=4, num_images=3), models, LIMITS)
    assert [picture.path.name for picture in job.pictures] == [
        "noto-other-faces-4.png",
        "noto-hearts-5.png",
        "noto-creatures-6.png",
    ]


def test_pictures_are_the_pipelines_and_hold_their_settings(models, tmp_path):
    options = Options(label="noto birds", seed=5, num_images=3, steps=2, batch_size=2)
    progress = list(draw(plan(options, models, LIMITS), models, tmp_path))
    assert [(at.batch, at.step.index, len(at.drawn)) for at in progress] == [
        (range(2), 0, 0),
        (range(2), 1, 2),
        (range(2, 3), 0, 0),
        (range(2, 3), 1, 1),
    ]
    assert [at.fraction for at in progress] == pytest.approx([1 / 3, 2 / 3, 5 / 6, 1])
    drawn = [picture for at in progress for picture in at.drawn]
    expected = Pipeline.from_pretrained("emoji64", device="cpu")(
        num_inference_steps=2, num_images=3, seed=5, class_labels="noto birds"
    )
    for seed, picture, image in zip((5, 6, 7), drawn, expected.images, strict=True):
        record = png.read_settings(picture.path)
        assert picture.path.name == f"noto-birds-{seed}.png"
        assert record == {"schema": 1, **picture.record}
        assert (record["seed"], record["label"], record["num_inference_steps"]) == (seed, "noto birds", 2)
        assert np.array_equal(pixels(picture.path), np.asarray(image))


def test_an_unconditional_model_draws_at_another_size(models, tmp_path):
    job = plan(Options(model="./plain/tiny", steps=2, width=24, height=32, scheduler="ddim"), models, LIMITS)
    *_, last = draw(job, models, tmp_path)
    assert pixels(last.drawn[0].path).shape == (32, 24, 3)
    assert last.drawn[0].path.name == "0.png"
    assert last.drawn[0].record["label"] is None


def test_stopping_between_steps_keeps_what_is_finished(models, tmp_path):
    steps = draw(plan(Options(num_images=2, steps=2, batch_size=1), models, LIMITS), models, tmp_path)
    for _ in range(3):
        next(steps)
    steps.close()
    assert [path.name for path in tmp_path.iterdir()] == ["fluent-3d-hearts-0.png"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory"), MemoryError, id="GPU"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError, id="CPU"),
        pytest.param(NonFiniteError("NaN"), NonFiniteError, id="NaN is no black picture"),
    ],
)
def test_failures_while_drawing(models, monkeypatch, tmp_path, error, expected):
    def fail(*args, **options):
        raise error

    job = plan(Options(steps=1), models, LIMITS)
    models.pipeline(job.card, None)
    monkeypatch.setattr(UNet2DModel, "predict", fail)
    with pytest.raises(expected):
        list(draw(job, models, tmp_path))


def test_a_full_disk_leaves_no_half_picture(models, monkeypatch, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastdiff.runs.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        list(draw(plan(Options(steps=1), models, LIMITS), models, tmp_path))
    assert not list(tmp_path.iterdir())


def test_every_limited_field_is_an_option():
    with pytest.raises(InputError, match="height 129"):
        jobs.plan(Options(height=129), None, LIMITS)

"""A new kind of pipeline needs only its own file and a row of the registry to be loaded, run and reported."""

import json

import numpy as np
import pytest

from fastdiff import InputError, LabelPipeline, Pipeline
from fastdiff.checkpoints import registry
from fastdiff.pipelines import load_pipeline
from fastdiff.pipelines.reporting import report
from fastdiff.requests.defaults import COMMAND, PAGE
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, draw, find_model, first_batch
from tests.pipelines import another_kind
from tests.pipelines.another_kind import MirrorModel, MirrorPipeline
from tests.support.tiny import UNET, save_unet


@pytest.fixture
def plain(tmp_path):
    """A folder of an existing kind."""
    return save_unet(tmp_path / "plain", **UNET)


@pytest.fixture
def folder(plain, tmp_path, monkeypatch):
    """The same model as a folder of the new kind, which is in the registry."""
    monkeypatch.setitem(registry.PIPELINES, another_kind.ROW.name, another_kind.ROW)
    folder = tmp_path / "mirror"
    plain.rename(tmp_path / "moved")
    (tmp_path / "moved" / "unet").rename(tmp_path / "moved" / "mirror")
    (tmp_path / "moved").rename(folder)
    edit(folder / "model_index.json", unet=None, mirror=["diffusers", "MirrorModel"], _class_name="MirrorPipeline")
    edit(folder / "model_index.json", mirrored=True)
    edit(folder / "mirror" / "config.json", _class_name="MirrorModel")
    return folder


def edit(path, **changes):
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def test_it_is_loaded_and_draws(plain, request):
    expected = LabelPipeline.from_pretrained(plain, device="cpu")(seed=3, num_inference_steps=2, output_type="np")
    pipe = Pipeline.from_pretrained(request.getfixturevalue("folder"), device="cpu")
    assert (type(pipe), type(pipe.denoiser)) == (MirrorPipeline, MirrorModel)
    pictures = pipe(seed=3, num_inference_steps=2, output_type="np").images
    assert np.array_equal(pictures, expected.images[:, :, ::-1])


def test_a_request_and_a_run_draw_it(folder):
    request = Request(model=str(folder), seed=(3, 4), num_inference_steps=2)
    run = Run.prepare(request, find_model(request), COMMAND, batch_size=1)
    assert (run.size, run.card.reads_text, run.request.scheduler) == ((8, 8), False, "ddim")
    pipe = load_pipeline(run.card, run.request, "cpu")
    finished = [each for progress in draw(run, pipe) for each in progress.finished]
    assert [each.record["seed"] for each in finished] == [3, 4]
    expected = pipe(seed=[3, 4], num_inference_steps=2).images
    assert [each.image.tobytes() for each in finished] == [image.tobytes() for image in expected]
    assert report(pipe, **first_batch(run)).launches > 0
    assert Run.prepare(Request(model=str(folder)), run.card, PAGE).request.num_inference_steps == 50


def test_a_class_loads_the_folders_that_it_draws(folder):
    assert isinstance(MirrorPipeline.from_pretrained(folder, device="cpu"), MirrorPipeline)
    with pytest.raises(InputError, match=r"it needs a MirrorPipeline; load it with Pipeline\.from_pretrained"):
        LabelPipeline.from_pretrained(folder, device="cpu")


def test_without_its_row_it_is_unknown(folder, monkeypatch):
    monkeypatch.delitem(registry.PIPELINES, another_kind.ROW.name)
    with pytest.raises(InputError, match="pipeline class 'MirrorPipeline' is not supported"):
        Pipeline.from_pretrained(folder, device="cpu")

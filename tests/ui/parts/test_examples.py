"""The opening page with the examples of its first model, and their pictures."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fastdiff.hosting.models import Models
from fastdiff.requests import defaults
from fastdiff.runs.drawing import draw
from fastdiff.ui.drawing import prepare
from fastdiff.ui.page import build_page
from fastdiff.ui.parts.examples import examples_of
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.serving.store import Store
from fastdiff.ui.shared import Shared


@pytest.fixture
def components(upload_folder):
    """Build the page and return the properties of the Draw tab's components by label or id."""

    async def build(shared: Shared) -> dict[str, dict]:
        found: dict[str, dict] = {}
        for each in build_page(shared, Limits(), Store(upload_folder)).get_config_file()["components"]:
            found.setdefault(each["props"].get("label") or each["props"].get("elem_id"), each["props"])
        return found

    return lambda shared: asyncio.run(build(shared))  # without an event loop, Gradio creates four and closes none


def test_a_class_model_opens_with_its_pickers(components):
    found = components(Shared(Models(device="cpu")))
    assert found["Style"]["visible"] and not found["Prompt"]["visible"]
    assert found["Group"]["value"] == "smiling faces"
    assert found["examples"]["visible"] and found["examples"]["value"].count("<img") == 6


def test_the_page_opens_with_what_it_draws_from_a_prompt(components, as_bundled):
    with as_bundled():
        found = components(Shared(Models(device="cpu")))
    assert (found["Model"]["value"], found["Prompt"]["value"]) == ("emoji-sd", "cat face, glossy 3D emoji")
    assert found["examples"]["visible"] and found["examples"]["value"].count("<img") == 6


def test_a_model_that_reads_text_opens_with_its_first_example(components, monkeypatch, text_folder, bundle_example):
    bundle_example("mine", text_folder("sd1"), prompt="a red <apple>")
    monkeypatch.setattr(defaults, "MODEL", "mine")
    found = components(Shared(Models(device="cpu")))
    assert found["Model"]["value"] == "mine"
    assert (found["Prompt"]["value"], found["Prompt"]["visible"]) == ("a red <apple>", True)
    assert not any(found[label]["visible"] for label in ("Style", "Group", "Label"))
    assert found["Size"]["choices"][0] == ("16x16", "16x16")
    assert 'data-name="1.png"' in found["examples"]["value"] and "a red &lt;apple&gt;</button>" in str(
        found["examples"]
    )


def test_only_bundled_models_have_examples(shared):
    assert examples_of(shared.catalogue.card("emoji64")) and not examples_of(shared.catalogue.card("./cats"))
    assert (shared.catalogue.card("./cats").folder / "examples").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "redrawn"), [("emoji-sd", 1), ("emoji64", 1), ("emoji64-dit", 2)])
def test_the_pictures_are_what_their_settings_draw(as_bundled, name, redrawn):
    """Draw all in one batch: each has the same bits as alone. Other machines may differ by a level or two."""
    with as_bundled():
        shared = Shared(Models(device="cpu"))
        card = shared.catalogue.card(name)
        examples = examples_of(card)
        runs = [prepare(UncheckedRequest.from_record(each.record), shared, Limits()) for each in examples]
    assert len(runs) == 6 and all(run.card == card for run in runs)
    assert len({replace(run.request, seed=0, label=(), prompt=()) for run in runs}) == 1
    run = replace(runs[0], cells=[run.cells[0] for run in runs[:redrawn]], batch_size=redrawn)
    *_, last = draw(run, shared.models.pipeline(card, run.request.scheduler))
    for each, finished in zip(examples[:redrawn], last.finished, strict=True):
        with Image.open(each.path) as shown:
            difference = np.abs(np.asarray(shown, np.int16) - np.asarray(finished.image, np.int16))
        assert difference.max() <= 8 and difference.mean() < 0.1, each.path.name

"""The form of Draw and Compare: the request of each side, fitting to a model, filling in from a picture."""

import asyncio
import json
from pathlib import Path

import gradio as gr
import pytest
from gradio.components import Component

from fastdiff.errors import InputError
from fastdiff.requests.completion import complete
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.sampler_names import SCHEDULERS
from fastdiff.ui.parts.controls import SamplingControls
from fastdiff.ui.parts.form import DrawForm, Form
from fastdiff.ui.parts.request import Limits
from tests.checkpoints.single_files import headers

RECORD = {"seed": 7, "label": "noto animals: birds", "num_inference_steps": 3, "scheduler": "ddim", "eta": 0.5}
RECORD |= {"width": 72, "height": 64}


@pytest.fixture
def build(catalogue):
    """Build a form that opens with the model emoji64."""

    def build(kind: type[Form]) -> Form:
        async def inside() -> Form:  # without an event loop, Gradio creates some and closes none
            with gr.Blocks():
                return kind.build(catalogue, catalogue.card("emoji64"), Limits())

        return asyncio.run(inside())

    return build


def values(form: Form) -> dict[Component, object]:
    """Return the initial values of the fields."""
    return {field: field.value for field in form.components}


def test_each_side_asks_for_its_own_model_and_half_the_steps(build):
    form = build(Form)
    _, b = form.sides
    data = values(form) | {form.seed: 5, b.model: "./plain/tiny", b.size.width: 24}
    first, second = (form.request(data, side) for side in (0, 1))
    assert (first.model, second.model) == ("emoji64", "./plain/tiny")
    assert first.label and second.label is None, "the labels belong to A's model"
    assert (first.seed, second.seed, first.steps, second.steps) == (5, 5, 50, 25)
    assert second.width == 24 != first.width


def test_labels_follow_the_first_side_and_prompts_both(build):
    form = build(Form)
    a, b = form.sides
    assert form.fit(values(form), 0) is form.fit(values(form), 1) is None
    of_b = form.fit(values(form) | {b.model: "./text/sd1"}, 1)
    assert of_b[b.fitted] == "./text/sd1" and a.fitted not in of_b
    assert form.boxes.prompt in of_b and form.labels.label not in of_b
    of_a = form.fit(values(form) | {a.model: "./plain/tiny", b.model: "./text/sd1"}, 0)
    assert of_a[form.boxes.prompt]["visible"] and not of_a[form.labels.style]["visible"]
    assert a.sampling.steps in of_a and b.sampling.steps not in of_a


def test_a_picture_fills_in_both_sides(build, catalogue):
    form = build(Form)
    shown = form.show(catalogue.card("./cats"), RECORD | {"label": 0})
    assert shown[form.seed] == 7
    for side in form.sides:
        assert shown[side.model] == shown[side.fitted] == "./cats"
        assert (shown[side.sampling.steps]["value"], shown[side.size.width]["value"]) == (3, 72)


def test_draw_asks_for_several_pictures_and_fills_in_what_it_asked_for(build, catalogue):
    form = build(DrawForm)
    data = values(form) | {form.num_images: 3, form.batch_size: 4, form.seed: 9}
    request = form.request(data)
    assert (request.num_images, request.batch_size, request.seed) == (3, 4, 9)
    shown = form.show_request(catalogue.card("emoji64"), request)
    assert (shown[form.num_images], shown[form.seed]) == (3, 9)
    elsewhere = form.show_request(catalogue.card("./plain/tiny"), request)
    assert elsewhere[form.labels.label]["value"] is None


def test_a_form_opens_with_a_random_seed_and_an_empty_one_is_random_too(build, catalogue):
    form = build(DrawForm)
    assert form.request(values(form)).seed == -1
    card = catalogue.card("emoji64")
    assert form.show_request(card, form.request(values(form) | {form.seed: None}))[form.seed] == -1


def test_an_axis_of_labels_stays_for_a_model_of_the_same_labels_only(build):
    form = build(DrawForm)
    typed = {form.axes.x: "label", form.axes.x_values: "noto birds"}
    kept, lost = (form.fit(values(form) | typed | {form.model: name}) for name in ("emoji64-dit", "./cats"))
    assert kept[form.axes.x]["value"] == "label" and lost[form.axes.x]["value"] == ""


def test_another_model_brings_its_own_settings_except_what_the_user_changed(build, catalogue):
    form = build(DrawForm)
    sampling = form.sides[0].sampling
    fitted = form.fit(values(form) | {form.model: "./text/sd1"})
    assert (fitted[sampling.scheduler]["value"], fitted[sampling.guidance_scale]["value"]) == ("pndm", 7.5)
    changed = form.fit(values(form) | {form.model: "./text/sd1", sampling.steps: 7, sampling.guidance_scale: 2})
    assert [changed[getattr(sampling, name)]["value"] for name in ("steps", "guidance_scale")] == [7, 2]
    assert changed[sampling.scheduler]["value"] == "pndm"


def test_the_slider_of_the_steps_ends_at_150_and_the_field_takes_what_the_model_takes(build, catalogue):
    sampling = build(DrawForm).sides[0].sampling
    assert (sampling.steps.value, sampling.steps_slider.value, sampling.steps_slider.maximum) == (50, 50, 150)
    assert sampling.steps.maximum is None
    record = RECORD | {"num_inference_steps": 400}
    properties = SamplingControls.properties(catalogue, catalogue.card("emoji64"), Limits(), record)
    assert (properties["steps"], properties["steps_slider"]) == ({"value": 400}, {"maximum": 150})
    tiny = SamplingControls.properties(catalogue, catalogue.card("./plain/tiny"), Limits())
    assert tiny["steps_slider"] == {"maximum": 100}, "the model has 100 steps"


@pytest.mark.parametrize("kind", [DrawForm, Form])
def test_the_scheduler_is_a_dropdown_of_every_scheduler_with_the_models_own_chosen(build, kind):
    form = build(kind)
    for side in form.sides:
        scheduler = side.sampling.scheduler
        assert isinstance(scheduler, gr.Dropdown) and [name for _, name in scheduler.choices] == [*SCHEDULERS]
        assert scheduler.value == "ddim"
    last = form.sides[-1]
    fitted = form.fit(values(form) | {last.model: "./text/sd1"}, len(form.sides) - 1)
    assert fitted[last.sampling.scheduler]["value"] == "pndm"


def test_styles_are_applied_to_the_prompts_of_the_request(build):
    form = build(DrawForm)
    typed = {form.boxes.prompt: "the\ncat", form.boxes.negative_prompt: "", form.model: "./text/sd1"}
    asked = form.request(values(form) | typed | {form.boxes.styles: ["wet"]})
    assert (asked.prompt, asked.negative_prompt) == ("the\ncat of the astronaut", "photo")
    asked = form.request(values(form) | typed)
    assert (asked.prompt, asked.negative_prompt) == ("the\ncat", None)
    for styles, message in ((["wett"], "did you mean wet"), ("wet", "is not a list"), ([1], "is not a list")):
        with pytest.raises(InputError, match=message):
            form.request(values(form) | typed | {form.boxes.styles: styles})


def test_a_style_that_the_server_no_longer_has_is_left_out(build, catalogue):
    boxes = build(DrawForm).boxes
    assert boxes.known_styles(catalogue, {boxes.styles: ["dry", "wet"]}) == ["wet"]
    assert boxes.known_styles(catalogue, {boxes.styles: None}) == []


def test_the_page_and_the_command_draw_a_model_with_the_same_settings(catalogue):
    for card in catalogue.cards():
        page = catalogue.default_sampling(card)
        command, _ = complete(Request(prompt=("",) if card.reads_text else ()), card, COMMAND)
        assert vars(page).items() <= vars(command).items(), card.name


@pytest.fixture(scope="module")
def headers_dir(tmp_path_factory) -> Path:
    """A folder with a file of each kind, without weights."""
    folder = tmp_path_factory.mktemp("headers")
    for kind in ("SD1", "SD2", "SDXL"):
        headers.write(folder / f"{kind}.safetensors", getattr(headers, kind))
    return folder


@pytest.mark.parametrize(
    ("kind", "side", "guidance", "scheduler"),
    [("SD1", 512, 7.5, "pndm"), ("SD2", 768, 7.5, "ddim"), ("SDXL", 1024, 5.0, "euler")],
)
def test_size_and_guidance_follow_the_kind(unserved_page, headers_dir, kind, side, guidance, scheduler):
    page = unserved_page(headers_dir)
    updates = json.loads(page.press("DrawTab.follow_model", {"Model": f"./{kind}.safetensors"}))
    named = zip(page.outputs("DrawTab.follow_model"), updates, strict=True)
    shown = {name: update["value"] for name, update in named if isinstance(update, dict) and "value" in update}
    assert (shown["Width"], shown["Height"], shown["Guidance"]) == (side, side, guidance)
    assert (shown["Scheduler"], shown["Steps"]) == (scheduler, 50)
    assert f"Ready to draw with ./{kind}.safetensors" in str(updates)

"""The fields of the start picture, and the events that fill them."""

import asyncio

import gradio as gr
import pytest

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.ui.drawing import Drawn
from fastdiff.ui.gallery import _change
from fastdiff.ui.inputs.size import size_from
from fastdiff.ui.parts.draw_fields import StartControls
from fastdiff.ui.parts.form import DrawForm
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.starting import _reader_near
from tests.ui.history.unserved import upload
from tests.ui.inputs.conftest import LIMITS, png_file

pytestmark = pytest.mark.usefixtures("one_thread")
START, TAB = "Starting.", "DrawTab."


@pytest.fixture
def form(catalogue):
    async def inside() -> DrawForm:  # without an event loop, Gradio creates some and closes none
        with gr.Blocks():
            return DrawForm.build(catalogue, catalogue.card("./text/sd1"), Limits())

    return asyncio.run(inside())


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param((64, 48), (64, 48), id="its own"),
        pytest.param((67, 49), (66, 48), id="a multiple"),
        pytest.param((1, 1), (2, 2), id="at least one multiple"),
        pytest.param((128, 128), (128, 128), id="the limit"),
        pytest.param((1024, 256), (32, 8), id="a photo: as many pixels as the model's 16 x 16"),
        pytest.param((20_000, 1), (128, 2), id="no side beyond the limit"),
    ],
)
def test_the_size_of_a_start_picture(catalogue, size, expected):
    assert size_from(size, catalogue.card("./text/sd1"), LIMITS.side) == expected


def test_the_fields_count_only_with_a_picture(form, catalogue):
    data = {field: field.value for field in form.components}
    assert form.request(data).init_image is form.request(data).strength is None
    asked = form.request(data | {form.start.picture: {"path": "a.png"}, form.start.strength: 0.6})
    assert (asked.init_image, asked.strength) == ({"path": "a.png"}, 0.6)
    assert not form.start.chosen(data | {form.start.picture: "a.png"}, catalogue.card("emoji64"))


def test_another_model_brings_its_own_strength_unless_it_was_changed(form, catalogue):
    sd1, sdxl, labels = map(catalogue.card, ("./text/sd1", "./text/sdxl", "emoji64"))
    start: StartControls = form.start
    assert start.fit((sd1, sdxl), {start.strength: 0.8})[start.strength] == 0.3
    assert start.fit((sd1, sdxl), {start.strength: 0.5})[start.strength] == 0.5
    assert start.fit((sd1, labels), {start.strength: 0.8})[start.box]["visible"] is False
    assert start.fit((labels, sdxl), {start.strength: 0.5})[start.strength] == 0.3


def test_emphasis_is_asked_for_with_weights_alone(form, catalogue):
    data = {field: field.value for field in form.components}
    prompting = form.prompting
    asked = form.request(data | {prompting.emphasis: "no-norm"})
    assert (asked.prompt_syntax, asked.emphasis) == ("plain", None)
    asked = form.request(data | {prompting.emphasis: "no-norm", prompting.prompt_syntax: "weighted"})
    assert (asked.prompt_syntax, asked.emphasis) == ("weighted", "no-norm")
    shown = form.show(catalogue.card("./text/sd1"), {"label": None, "prompt_syntax": "weighted", "guidance_stop": 0.5})
    assert shown[prompting.emphasis]["visible"] and shown[prompting.guidance_stop]["value"] == 0.5
    assert shown[prompting.guidance_start]["value"] == 0
    assert not prompting.chosen(data, catalogue.card("emoji64"))


def test_a_picture_that_is_gone_leaves_the_form(form, upload_folder):
    there = upload(png_file(), "a.png")
    asked = UncheckedRequest("./text/sd1", prompt="", init_image=there["path"], strength=0.5)
    assert form.known_files(asked).strength == 0.5
    gone = form.known_files(UncheckedRequest("./text/sd1", prompt="", init_image="/etc/passwd", strength=0.5))
    assert gone.init_image is gone.strength is None


def test_a_dropped_picture_sets_the_size(page):
    said = page.press(f"{START}begin", {"Start picture": upload(png_file((48, 40)), "a.png"), "Model": "./text/sd1"})
    assert "Starts from a.png." in said and '"value":48' in said and '"value":40' in said
    said = page.press(f"{START}begin", {"Start picture": upload(b"no picture", "b.png"), "Model": "./text/sd1"})
    assert "Init_image" not in said and "b.png" in said and "is not a picture" in said
    assert str(page.session.store.root) not in said


def test_a_drawn_picture_becomes_the_start_picture(page, picture, apple):
    drawn = picture(init_image=apple, strength=0.4)
    said = page.press(f"{START}start_from.<locals>.start")
    assert "no picture selected" in said
    page.choose(f"{START}start_from.<locals>.start", drawn)
    said = page.press(f"{START}start_from.<locals>.start", {"Model": "./text/sd1"})
    assert f"Starts from {drawn.path.name}." in said and "Chose" not in said
    said = page.press(f"{START}start_from.<locals>.start", {"Model": "emoji64"})
    assert "Chose emoji-sd, because emoji64 reads no prompts." in said


def test_the_settings_of_a_picture_bring_its_start_picture_back(page, picture, apple):
    drawn = picture(init_image=apple, strength=0.4)
    page.choose(f"{TAB}use", drawn)
    said = page.press(f"{TAB}use")
    assert "apple.png" in said and "not restored" not in said and "Loaded the settings of seed 5<" in said
    dropped = {"Drop a picture anywhere to load its settings": upload(drawn.path.read_bytes(), "d.png")}
    said = page.press(f"{TAB}restore", dropped)
    assert "apple.png" in said and "not restored" not in said
    lone = drawn.path.with_name("lone.png")
    lone.write_bytes(png.without_inputs(drawn.path))
    page.choose(f"{TAB}use", Drawn(lone, drawn.record))
    said = page.press(f"{TAB}use")
    assert "not restored: the start picture apple.png, which is not inside lone.png" in said


def test_compare_says_what_only_draw_has(page, picture, apple):
    page.choose("CompareTab.send", picture(init_image=apple, strength=0.4, prompt_syntax="weighted"))
    said = page.press("CompareTab.send")
    assert "Not restored: Start picture, Strength, Prompt syntax." in said


def test_the_panel_compares_a_picture_with_its_start(page, picture, apple):
    assert _change(picture())["visible"] is False
    shown = _change(picture(init_image=apple, strength=0.4))
    assert shown["visible"] is True and len(shown["value"]) == 2


def test_no_model_that_reads_text(catalogue):
    card = catalogue.card("emoji64")
    with pytest.raises(InputError, match="no model here reads prompts"):
        _reader_near(card, [card])
    assert _reader_near(card, [card, catalogue.card("./text/sd1")]).name == "./text/sd1"

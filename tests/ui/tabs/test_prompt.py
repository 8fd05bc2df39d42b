"""The boxes of models that read text: which are shown, what is in them, and the tokens that are counted."""

import asyncio

import gradio as gr
import pytest

from fastdiff.errors import InputError
from fastdiff.ui.tabs.prompt import PromptBoxes, count_tokens
from tests.support.text_pipelines import LENGTH

ROOM = LENGTH - 2


@pytest.fixture
def card(models):
    return lambda name: models.card(name)


def test_class_models_have_no_boxes(models, card):
    properties = PromptBoxes.properties(models, [card("emoji64")])
    assert not any(each["visible"] for each in properties.values())
    assert properties["prompt"]["value"] == properties["tokens"]["value"] == ""


def test_boxes_hold_the_texts_of_a_record(models, card):
    record = {"prompt": "the cat", "negative_prompt": None}
    properties = PromptBoxes.properties(models, [card("./text/sd1")], record)
    assert {name: each["value"] for name, each in properties.items()} == {
        "prompt": "the cat",
        "negative_prompt": "",
        "tokens": f"<div>2 of {ROOM} tokens</div>",
    }
    assert all(each["visible"] for each in properties.values())


def test_a_model_with_examples_opens_with_the_first(models, card, bundle_example):
    bundle_example("sd1", card("./text/sd1").folder, prompt="the cat")
    assert PromptBoxes.properties(models, [card("sd1")])["prompt"]["value"] == "the cat"
    assert PromptBoxes.properties(models, [card("./text/sdxl")])["prompt"]["value"] == ""


def test_one_of_two_models_reads_text(models, card):
    properties = PromptBoxes.properties(models, [card("emoji64"), card("./text/sd1")], {"prompt": "the cat"})
    assert properties["prompt"] == {"value": "the cat", "visible": True}
    assert properties["tokens"]["value"] == f"<div>2 of {ROOM} tokens</div>"


def test_another_model_overwrites_no_count_of_what_is_typed_meanwhile(models, card):
    async def build() -> PromptBoxes:  # outside of an event loop Gradio makes some and closes none
        with gr.Blocks():
            return PromptBoxes.build(models, card("./text/sd1"))

    boxes = asyncio.run(build())
    updates = boxes.fit(models, [card("./text/sdxl")], {boxes.prompt: "the", boxes.negative_prompt: ""})
    assert not {"value"} & {*updates[boxes.prompt], *updates[boxes.tokens]}


def test_what_is_cut_is_shown(models, card):
    text = "cat " * ROOM + "the <b>astronaut"
    line = count_tokens(models, [card("./text/sdxl")], text, "ocean")
    assert f"<div>{ROOM + 5} of {ROOM} tokens; cut: <strong" in line and ">the &lt;b&gt;astronaut<" in line
    assert "<div>Negative prompt: 5 of" in line


def test_a_text_without_end_is_refused_and_not_counted(models, card):
    with pytest.raises(InputError, match=r"prompt: .* is not a text of up to 10000"):
        count_tokens(models, [card("./text/sd1")], "x" * 10**6)

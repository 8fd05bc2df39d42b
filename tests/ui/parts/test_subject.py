"""Label pickers and prompt boxes: which are visible, what they contain, and the token counts."""

import asyncio

import gradio as gr
import pytest

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.ui.parts.subject import LabelPickers, PromptBoxes, _choices, count_tokens
from tests.support.text_pipelines import LENGTH

GRID = ["red cat", "red dog", "blue cat", "blue dog"]
ROOM = LENGTH - 2


@pytest.fixture
def pickers():
    return LabelPickers(*(gr.Dropdown(label=name, render=False) for name in ("Style", "Group", "Label")))


def shown(properties) -> list[str]:
    return [name for name, each in properties.items() if each["visible"]]


def test_names_that_begin_with_styles(card):
    properties = LabelPickers.properties(card(info={"labels": GRID, "null_label": 36}), "blue cat")
    assert shown(properties) == ["style", "group"]
    assert properties["style"] == {"choices": ["red", "blue"], "value": "blue", "visible": True}
    assert properties["group"] == {"choices": [("cat", "cat"), ("dog", "dog")], "value": "cat", "visible": True}


def test_a_group_comes_before_its_labels(card):
    info = {"labels": [*GRID, "red sky"], "label_groups": {"red pets": GRID[:2], "blue pets": GRID[2:]}}
    properties = LabelPickers.properties(card(info=info), "red dog")
    assert properties["style"]["value"] == "red"
    assert properties["group"] == {
        "choices": [("pets: any", "pets"), ("pets: cat", "cat"), ("pets: dog", "dog"), ("sky", "sky")],
        "value": "dog",
        "visible": True,
    }


def test_groups_without_styles(card):
    properties = LabelPickers.properties(
        card(info={"labels": ["cat", "dog", "sky"], "label_groups": {"pets": ["cat", "dog"]}})
    )
    assert properties["label"] == {
        "choices": [("pets: any", "pets"), ("pets: cat", "cat"), ("pets: dog", "dog"), ("sky", "sky")],
        "value": "pets",
        "visible": True,
    }


def test_every_choice_is_a_label_of_the_bundled_model(catalogue):
    bundled = catalogue.card("emoji64")
    styles = LabelPickers.properties(bundled)["style"]["choices"]
    assert styles == ["fluent-3d", "fluent-flat", "noto", "twemoji"]
    names = [f"{style} {name}" for style in styles for _, name in _choices(bundled, style)]
    assert {index for name in names for index in bundled.info.label_choices(name)} == set(bundled.labels)
    assert set(names) == {*bundled.info.labels, *bundled.info.label_groups}


@pytest.mark.parametrize(
    "info",
    [
        pytest.param({"labels": ["red cat", "red dog"]}, id="only one style"),
        pytest.param({"labels": ["red cat", "red dog", "blue cat"]}, id="a style of one label"),
        pytest.param({"labels": ["red cat", "red dog", "blue", "blue dog"]}, id="one word"),
        pytest.param({"labels": GRID, "label_groups": {"red cats": ["red cat", "blue cat"]}}, id="group of two styles"),
    ],
)
def test_other_labels_are_one_list(card, info):
    properties = LabelPickers.properties(card(info=info))
    assert shown(properties) == ["label"]
    assert {name for _, name in properties["label"]["choices"]} == {*info["labels"], *info.get("label_groups", ())}


def test_labels_without_names_are_their_indices(card):
    properties = LabelPickers.properties(card(num_class_embeds=3))
    assert properties["label"] == {"choices": [("0", 0), ("1", 1), ("2", 2)], "value": 0, "visible": True}


def test_a_label_without_a_name_stands_among_the_others_by_its_index(card):
    gappy = card(info={"labels": ["red cat", None, "blue cat"]})
    properties = LabelPickers.properties(gappy)
    choices = [("red cat", "red cat"), ("1", 1), ("blue cat", "blue cat")]
    assert properties["label"] == {"choices": choices, "value": "red cat", "visible": True}
    assert LabelPickers.offers(gappy, 1) and not LabelPickers.offers(gappy, 3)


def test_labels_on_offer(card, card_folder):
    named = card(info={"labels": ["a", "b"], "label_groups": {"both": ["a", "b"]}})
    assert [LabelPickers.offers(named, label) for label in ("a", "both", "c", 0, None)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    unconditional = ModelCard.read("other", card_folder("other", num_class_embeds=None))
    assert [LabelPickers.offers(unconditional, label) for label in (None, 0)] == [True, False]


@pytest.mark.parametrize(
    ("style", "group", "label", "expected"),
    [
        pytest.param("noto", "animals", None, "noto animals", id="style and group"),
        pytest.param(None, None, "red", "red", id="label"),
        pytest.param(None, None, 0, 0, id="index 0 is a label"),
        pytest.param(None, None, None, None, id="unconditional"),
    ],
)
def test_the_label_that_the_controls_name(pickers, style, group, label, expected):
    assert pickers.chosen({pickers.style: style, pickers.group: group, pickers.label: label}) == expected


def test_an_unconditional_model_has_no_labels(card):
    assert shown(LabelPickers.properties(card(num_class_embeds=None))) == []


def test_class_models_have_no_boxes(catalogue):
    properties = PromptBoxes.properties(catalogue, [catalogue.card("emoji64")])
    assert not any(each["visible"] for each in properties.values())
    assert properties["prompt"]["value"] == properties["tokens"]["value"] == ""


def test_boxes_hold_the_texts_of_a_record(catalogue):
    record = {"prompt": "the cat", "negative_prompt": None}
    properties = PromptBoxes.properties(catalogue, [catalogue.card("./text/sd1")], record)
    assert {name: each["value"] for name, each in properties.items()} == {
        "prompt": "the cat",
        "tokens": f"<div>2 of {ROOM} tokens</div>",
        "styles": [],
        "recent": None,
        "negative_prompt": "",
        "negative_tokens": f"<div>0 of {ROOM} tokens</div>",
    }
    assert all(each["visible"] for each in properties.values())


def test_a_model_with_examples_opens_with_the_first(catalogue, bundle_example):
    bundle_example("sd1", catalogue.card("./text/sd1").folder, prompt="the cat")
    assert PromptBoxes.properties(catalogue, [catalogue.card("sd1")])["prompt"]["value"] == "the cat"
    assert PromptBoxes.properties(catalogue, [catalogue.card("./text/sdxl")])["prompt"]["value"] == ""


def test_one_of_two_models_reads_text(catalogue):
    properties = PromptBoxes.properties(
        catalogue, [catalogue.card("emoji64"), catalogue.card("./text/sd1")], {"prompt": "the cat"}
    )
    assert properties["prompt"] == {"value": "the cat", "visible": True}
    assert properties["tokens"]["value"] == f"<div>2 of {ROOM} tokens</div>"


def test_styles_are_offered_if_the_server_has_some(catalogue, models_dir):
    properties = PromptBoxes.properties(Catalogue(models_dir), [catalogue.card("./text/sd1")])
    assert properties["prompt"]["visible"] and not properties["styles"]["visible"]


def test_another_model_overwrites_no_count_of_what_is_typed_meanwhile(catalogue):
    async def build() -> PromptBoxes:  # without an event loop, Gradio creates some and closes none
        with gr.Blocks():
            return PromptBoxes.build(catalogue, catalogue.card("./text/sd1"))

    boxes = asyncio.run(build())
    updates = boxes.fit(catalogue, [catalogue.card("./text/sdxl")], {boxes.prompt: "the", boxes.negative_prompt: ""})
    kept = boxes.prompt, boxes.tokens, boxes.negative_prompt, boxes.negative_tokens, boxes.styles
    assert not [box for box in kept if "value" in updates[box]]


def test_what_is_cut_is_shown(catalogue):
    text = "cat " * ROOM + "the <b>astronaut"
    line = count_tokens(catalogue, [catalogue.card("./text/sdxl")], text)
    assert f"<div>{ROOM + 5} of {ROOM} tokens; cut off: <strong" in line and ">the &lt;b&gt;astronaut<" in line


def test_a_line_break_counts_as_a_space(catalogue):
    cards = [catalogue.card("./text/sd1")]
    assert count_tokens(catalogue, cards, "the\ncat\n\nof") == count_tokens(catalogue, cards, "the cat of")


def test_a_text_without_end_is_refused_and_not_counted(catalogue):
    with pytest.raises(InputError, match=r"prompt: .* is not a string of up to 10000"):
        count_tokens(catalogue, [catalogue.card("./text/sd1")], "x" * 10**6)
    with pytest.raises(InputError, match=r"^negative_prompt: "):
        count_tokens(catalogue, [catalogue.card("./text/sd1")], "x" * 10**6, "negative_prompt")


def test_a_weighted_text_is_counted_in_chunks(catalogue):
    cards = [catalogue.card("./text/sd1")]
    assert "2 tokens in 1 chunk of 22" in count_tokens(catalogue, cards, "(the:1.2) [cat:of:0.5]", is_weighted=True)
    long = count_tokens(catalogue, cards, "cat " * 30, is_weighted=True)
    assert "30 tokens in 2 chunks of 22" in long and "cut off" not in long
    with pytest.raises(InputError, match=r"^prompt: AND combines"):
        count_tokens(catalogue, cards, "a cat AND a dog", is_weighted=True)

"""What the form offers for each kind of model."""

import gradio as gr
import pytest

from fastdiff.settings import ModelCard
from fastdiff.ui.controls import Sampling, Size, Subject, can_guide
from fastdiff.ui.limits import Limits

GRID = ["red cat", "red dog", "blue cat", "blue dog"]


@pytest.fixture
def card(card_folder):
    def read(**config) -> ModelCard:
        return ModelCard.read("model", card_folder(**config))

    return read


@pytest.fixture
def subject():
    return Subject(*(gr.Dropdown(label=name, render=False) for name in ("Style", "Group", "Label")))


def shown(properties) -> list[str]:
    return [name for name, each in properties.items() if each["visible"]]


def test_labels_that_are_all_pairs_become_style_and_group(card):
    properties = Subject.properties(card(info={"labels": GRID, "null_label": 36}), "blue cat")
    assert shown(properties) == ["style", "group"]
    assert properties["style"] == {"choices": ["red", "blue"], "value": "blue", "visible": True}
    assert properties["group"] == {"choices": ["cat", "dog"], "value": "cat", "visible": True}


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        pytest.param(GRID[:3], "not all pairs", id="a pair is missing"),
        pytest.param(["red cat", "red dog"], "one style", id="only one style"),
        pytest.param(["red", "blue cat"], "one word", id="one word"),
    ],
)
def test_other_labels_are_one_list(card, labels, why):
    properties = Subject.properties(card(info={"labels": labels}))
    assert shown(properties) == ["label"], why
    assert properties["label"]["choices"] == [(label, label) for label in labels]


def test_labels_without_names_are_their_indices(card):
    properties = Subject.properties(card(num_class_embeds=3))
    assert properties["label"] == {"choices": [("0", 0), ("1", 1), ("2", 2)], "value": 0, "visible": True}


def test_a_label_that_the_model_lacks_is_not_chosen(card):
    assert Subject.properties(card(info={"labels": ["a", "b"]}), "c")["label"]["value"] == "a"


def test_an_unconditional_model_has_no_labels_and_no_guidance(card, models):
    unconditional = card(num_class_embeds=None)
    assert shown(Subject.properties(unconditional)) == []
    assert not can_guide(unconditional)
    assert not Sampling.properties(models, unconditional, Limits())["guidance_scale"]["visible"]


@pytest.mark.parametrize(
    ("style", "group", "label", "expected"),
    [
        pytest.param("noto", "animals", None, "noto animals", id="style and group"),
        pytest.param(None, None, "red", "red", id="label"),
        pytest.param(None, None, 0, 0, id="index 0 is a label"),
        pytest.param(None, None, None, None, id="unconditional"),
    ],
)
def test_the_label_that_the_controls_name(subject, style, group, label, expected):
    assert subject.chosen({subject.style: style, subject.group: group, subject.label: label}) == expected


def test_sampling_follows_the_model_and_a_record(card, models):
    own = card(info={"num_inference_steps": 9, "scheduler": "ddpm"})
    properties = Sampling.properties(models, own, Limits(steps=500))
    assert properties["steps"] == {"maximum": 500, "value": 9}
    assert properties["scheduler"] == {"value": "ddpm"}
    assert not properties["eta"]["visible"]
    record = {"num_inference_steps": 3, "scheduler": "ddim", "eta": 0.5, "guidance_scale": None}
    properties = Sampling.properties(models, own, Limits(), record)
    assert properties["steps"]["value"] == 3
    assert properties["eta"] == {"value": 0.5, "visible": True}
    assert properties["guidance_scale"]["value"] == 1.0


def test_only_sizes_that_the_model_can_draw(card):
    properties = Size.properties(card(sample_size=[32, 48], block_out_channels=[64, 64, 128, 128]), Limits(side=100))
    assert {key: properties["width"][key] for key in ("minimum", "maximum", "step", "value")} == {
        "minimum": 8,
        "maximum": 96,
        "step": 8,
        "value": 48,
    }
    assert properties["height"]["value"] == 32


def test_a_model_without_a_size_gets_one(card):
    assert Size.properties(card(sample_size=None), Limits())["width"]["value"] == 64

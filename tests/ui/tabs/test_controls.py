"""The controls of the form, for each kind of model."""

import gradio as gr
import pytest

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.ui.limits import Limits
from fastdiff.ui.tabs.controls import Sampling, Size, Subject, _choices, can_guide

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


def test_names_that_begin_with_styles(card):
    properties = Subject.properties(card(info={"labels": GRID, "null_label": 36}), "blue cat")
    assert shown(properties) == ["style", "group"]
    assert properties["style"] == {"choices": ["red", "blue"], "value": "blue", "visible": True}
    assert properties["group"] == {"choices": [("cat", "cat"), ("dog", "dog")], "value": "cat", "visible": True}


def test_a_group_comes_before_its_labels(card):
    info = {"labels": [*GRID, "red sky"], "label_groups": {"red pets": GRID[:2], "blue pets": GRID[2:]}}
    properties = Subject.properties(card(info=info), "red dog")
    assert properties["style"]["value"] == "red"
    assert properties["group"] == {
        "choices": [("pets: any", "pets"), ("pets: cat", "cat"), ("pets: dog", "dog"), ("sky", "sky")],
        "value": "dog",
        "visible": True,
    }


def test_groups_without_styles(card):
    properties = Subject.properties(
        card(info={"labels": ["cat", "dog", "sky"], "label_groups": {"pets": ["cat", "dog"]}})
    )
    assert properties["label"] == {
        "choices": [("pets: any", "pets"), ("pets: cat", "cat"), ("pets: dog", "dog"), ("sky", "sky")],
        "value": "pets",
        "visible": True,
    }


def test_every_choice_is_a_label_of_the_bundled_model(models):
    bundled = models.card("emoji64")
    styles = Subject.properties(bundled)["style"]["choices"]
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
    properties = Subject.properties(card(info=info))
    assert shown(properties) == ["label"]
    assert {name for _, name in properties["label"]["choices"]} == {*info["labels"], *info.get("label_groups", ())}


def test_labels_without_names_are_their_indices(card):
    properties = Subject.properties(card(num_class_embeds=3))
    assert properties["label"] == {"choices": [("0", 0), ("1", 1), ("2", 2)], "value": 0, "visible": True}


def test_a_label_without_a_name_stands_among_the_others_by_its_index(card):
    gappy = card(info={"labels": ["red cat", None, "blue cat"]})
    properties = Subject.properties(gappy)
    choices = [("red cat", "red cat"), ("1", 1), ("blue cat", "blue cat")]
    assert properties["label"] == {"choices": choices, "value": "red cat", "visible": True}
    assert Subject.offers(gappy, 1) and not Subject.offers(gappy, 3)


def test_labels_on_offer(card, card_folder):
    named = card(info={"labels": ["a", "b"], "label_groups": {"both": ["a", "b"]}})
    assert [Subject.offers(named, label) for label in ("a", "both", "c", 0, None)] == [True, True, False, False, False]
    unconditional = ModelCard.read("other", card_folder("other", num_class_embeds=None))
    assert [Subject.offers(unconditional, label) for label in (None, 0)] == [True, False]


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

"""fastdiff.json: what is read, what is an error, and how labels are named."""

import json
from pathlib import Path

import diffusers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdiff.checkpoints.hub import bundled_models
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.errors import InputError

EMOJI64 = ModelInfo.from_folder(bundled_models()["emoji64"], num_classes=217)


def write(folder: Path, content: object) -> Path:
    (folder / "fastdiff.json").write_text(json.dumps(content))
    return folder


def test_absent_file_leaves_every_option_open(tmp_path):
    assert ModelInfo.from_folder(tmp_path) == ModelInfo()


def test_all_keys_are_read(tmp_path):
    content = {
        "labels": ["cat", "dog"],
        "prompts": ["a cat", ""],
        "null_label": 2,
        "guidance_scale": 3,
        "guidance_scale_with_mask": 4,
        "num_inference_steps": 20,
        "scheduler": "ddpm",
        "eta": 0.5,
        "use_clipped_model_output": False,
    }
    expected = content | {"labels": ("cat", "dog"), "prompts": ("a cat", "")}
    assert ModelInfo.from_folder(write(tmp_path, content)) == ModelInfo(**expected)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param({"steps": 3}, "steps", id="unknown-key"),
        pytest.param([], "JSON object", id="not-an-object"),
        pytest.param({"labels": "cat"}, "labels", id="labels-is-text"),
        pytest.param({"labels": ["cat", 1]}, "labels", id="label-is-a-number"),
        pytest.param({"labels": ["cat", ""]}, "labels", id="label-is-empty"),
        pytest.param({"labels": ["cat", None], "label_groups": {"a": [None]}}, "label_groups", id="group-of-no-name"),
        pytest.param({"labels": ["cat", "dog", "cat"]}, "cat more than once", id="two-labels-of-one-name"),
        pytest.param({"prompts": "a cat"}, "prompts", id="prompts-is-text"),
        pytest.param({"prompts": [7]}, "prompts", id="prompt-is-a-number"),
        pytest.param({"prompts": ["x" * 10_001]}, "up to 10000 characters", id="prompt-too-long"),
        pytest.param({"prompts": ["x"] * 101}, "prompts", id="too-many-prompts"),
        pytest.param({"null_label": -1}, "null_label", id="null-label-negative"),
        pytest.param({"null_label": True}, "null_label", id="null-label-is-a-bool"),
        pytest.param({"null_label": 5}, "ends at 3", id="null-label-beyond-the-table"),
        pytest.param({"labels": list("abcde")}, "ends at 3", id="more-labels-than-the-table"),
        pytest.param({"guidance_scale": float("nan")}, "guidance_scale", id="guidance-nan"),
        pytest.param({"guidance_scale": "2"}, "guidance_scale", id="guidance-is-text"),
        pytest.param({"num_inference_steps": 0}, "num_inference_steps", id="no-steps"),
        pytest.param({"num_inference_steps": 50.0}, "num_inference_steps", id="steps-is-a-float"),
        pytest.param({"scheduler": "eular"}, "ddim, ddpm", id="unknown-scheduler"),
        pytest.param({"scheduler": ["ddim"]}, "ddim, ddpm", id="scheduler-is-a-list"),
        pytest.param({"eta": 1.5}, "eta", id="eta-above-1"),
        pytest.param({"use_clipped_model_output": 1}, "use_clipped_model_output", id="bool-is-a-number"),
    ],
)
def test_bad_file_is_one_line_that_names_it(tmp_path, content, named):
    with pytest.raises(InputError) as error:
        ModelInfo.from_folder(write(tmp_path, content), num_classes=4)
    message = str(error.value)
    assert named in message and "fastdiff.json" in message and "\n" not in message


# Part of the id2label of facebook/DiT-XL-2-256.
IMAGENET = {"0": "tench, Tinca tinca", "1": "crane", "2": "great white shark, white shark, man-eater", "3": "crane"}


def write_index(folder: Path, **index: object) -> Path:
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline", **index}))
    return folder


def test_a_dit_pipeline_guides_and_names_its_labels_as_diffusers(tmp_path):
    info = ModelInfo.from_folder(write_index(tmp_path, id2label=IMAGENET), num_classes=5, null_label=4)
    names = ("tench, Tinca tinca", "crane", "great white shark, white shark, man-eater", "crane (3)")
    assert info == ModelInfo(labels=(*names, None), null_label=4, guidance_scale=4.0)
    assert [info.label_index(name) for name in ("Tinca tinca", "tench", "white shark", "crane", "crane 3")] == [
        *(0, 0, 2, 1, 3)
    ]


def test_fastdiff_json_wins_over_the_pipelines_own(tmp_path):
    write(write_index(tmp_path, id2label=IMAGENET), {"guidance_scale": 1.5, "labels": ["cat"], "null_label": 2})
    info = ModelInfo.from_folder(tmp_path, num_classes=5, null_label=4)
    assert info == ModelInfo(labels=("cat",), guidance_scale=1.5, null_label=2)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        pytest.param(["cat"], (), id="list"),
        pytest.param("cat", (), id="text"),
        pytest.param(None, (), id="null"),
        pytest.param({}, (), id="empty"),
        pytest.param({"cat": "0"}, (), id="reversed"),
        pytest.param({"0": "cat", "2": "dog"}, ("cat", None, "dog", None, None), id="gap"),
        pytest.param({"3": "cat"}, (None, None, None, "cat", None), id="the-last-alone"),
        pytest.param({"0": "cat", "1": "cat"}, ("cat", "cat (1)", None, None, None), id="one-name-twice"),
        pytest.param(
            {"0": "cat (2)", "1": "cat", "2": "cat"},
            ("cat (2)", "cat", "cat (2) (2)", None, None),
            id="one-name-twice-and-its-number-taken",
        ),
        pytest.param({"1": "cat", "01": "tabby"}, (None, "cat, tabby", None, None, None), id="two-keys-of-a-label"),
        pytest.param({" 1 ": "cat", "+2": "dog"}, (None, "cat", "dog", None, None), id="keys-that-int-takes"),
        pytest.param({"0": "cat", "5": "dog", "-1": "cow", "9" * 5000: "x"}, ("cat", *[None] * 4), id="beyond"),
        pytest.param({"0": "cat", "1.0": "dog", "": "cow", "x": "y"}, ("cat", *[None] * 4), id="keys-no-numbers"),
        pytest.param({"0": 7, "1": None, "2": ["a"], "3": "", "4": "cat"}, (*[None] * 4, "cat"), id="no-texts"),
    ],
)
def test_a_name_file_never_stops_a_model(tmp_path, names, labels):
    info = ModelInfo.from_folder(write_index(tmp_path, id2label=names), num_classes=5, null_label=4)
    assert info == ModelInfo(labels=labels, null_label=4, guidance_scale=4.0)
    for index in range(5):
        named = info.label_name(index)
        assert info.label_index(named, num_classes=5) == info.label_index(str(index), num_classes=5) == index
        assert named == index or named == labels[index]


def test_without_a_label_table_there_is_nothing_to_name(tmp_path):
    assert ModelInfo.from_folder(write_index(tmp_path, id2label=IMAGENET)).labels == ()


@pytest.mark.parametrize(
    "id2label",
    [
        pytest.param({"0": "tench, Tinca tinca", "7": "cock", "999": "toilet tissue, bathroom tissue"}, id="gaps"),
        pytest.param({"3": "cat", "03": "tabby cat,moggy", " 4": "dog ,hound"}, id="keys-and-spaces"),
    ],
)
def test_every_name_of_diffusers_pipeline_finds_the_same_label(tmp_path, id2label):
    info = ModelInfo.from_folder(write_index(tmp_path, id2label=id2label), num_classes=1001, null_label=1000)
    theirs = diffusers.DiTPipeline(None, None, None, id2label=id2label).labels
    assert len(theirs) >= 4
    assert {name: info.label_index(name, num_classes=1001) for name in theirs} == theirs


def test_names_of_our_own_file_may_have_holes(tmp_path):
    info = ModelInfo.from_folder(write(tmp_path, {"labels": ["cat", None, "dog"]}), num_classes=4)
    assert [info.label_name(index) for index in range(4)] == ["cat", 1, "dog", 3]
    assert [info.label_index(label) for label in ("cat", "1", 1, "dog")] == [0, 1, 1, 2]
    with pytest.raises(InputError, match="did you mean cat"):
        info.label_index("cart")


def test_labels_that_all_lack_a_name_are_asked_for_by_number():
    with pytest.raises(InputError, match="give an index"):
        ModelInfo(labels=(None, None)).label_index("None")


NOTO_BIRDS = EMOJI64.labels.index("noto birds")


def test_emoji64_names_every_label_by_style_and_group():
    assert len(EMOJI64.labels) == EMOJI64.null_label == 216
    assert EMOJI64.labels[0] == "fluent-3d hearts"
    assert EMOJI64.labels[-1] == "twemoji flags"
    grouped = [name for names in EMOJI64.label_groups.values() for name in names]
    assert sorted(grouped) == sorted(EMOJI64.labels), "every label is in one group of the first emoji64's names"


def test_a_group_stands_for_its_labels_in_turn():
    choices = EMOJI64.label_choices("noto animals", num_classes=217)
    assert [EMOJI64.labels[i] for i in choices] == list(EMOJI64.label_groups["noto animals"])
    assert [EMOJI64.label_index("Noto_Animals", seed=seed) for seed in range(7)] == [*choices, choices[0]]


@pytest.mark.parametrize("name", ["fluent-3d flags", "Fluent Flat flags"])
def test_a_name_of_the_first_emoji64_that_is_gone_says_what_replaced_it(name):
    with pytest.raises(InputError, match="noto flags or twemoji flags"):
        EMOJI64.label_index(name)


@pytest.mark.parametrize(
    ("label", "index"),
    [
        pytest.param("noto birds", NOTO_BIRDS, id="name"),
        pytest.param("Noto/Birds", NOTO_BIRDS, id="case-and-slash"),
        pytest.param(" noto_birds ", NOTO_BIRDS, id="underscore-and-spaces"),
        pytest.param("noto: birds!", NOTO_BIRDS, id="other-signs"),
        pytest.param("Fluent 3D hearts", 0, id="hyphen-left-out"),
        pytest.param("twemoji fl", 215, id="the-only-one-that-begins-so"),
        pytest.param("20", 20, id="digits"),
        pytest.param(20, 20, id="index"),
        pytest.param(216, 216, id="null-label"),
    ],
)
def test_label_index(label, index):
    assert EMOJI64.label_index(label, num_classes=217) == index


@pytest.mark.parametrize(
    ("label", "named"),
    [
        pytest.param("noto aminals", "noto animals", id="misspelt"),
        pytest.param("noto me", "noto meals, noto medals and prizes", id="two-begin-so"),
        pytest.param("flags", "noto flags", id="second-word-only"),
        pytest.param("zebra", "fastdiff models", id="nothing-close"),
        pytest.param("", "fastdiff models", id="empty"),
        pytest.param("&/", "fastdiff models", id="signs-only"),
        pytest.param(217, "0 to 216", id="beyond"),
        pytest.param("-1", "0 to 216", id="negative"),
        pytest.param("9" * 5000, "not a label", id="digits-without-end"),
    ],
)
def test_unknown_label_is_one_line_with_the_remedy(label, named):
    with pytest.raises(InputError) as error:
        EMOJI64.label_index(label, num_classes=217)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_range_without_the_table_size_is_that_of_the_known_labels():
    assert EMOJI64.label_index(216) == 216
    with pytest.raises(InputError, match="0 to 216"):
        EMOJI64.label_index(217)


def test_model_without_names_takes_indices_only():
    assert ModelInfo().label_index("9", num_classes=10) == 9
    with pytest.raises(InputError, match="give an index"):
        ModelInfo().label_index("cat", num_classes=10)


def test_a_name_made_of_digits_wins_over_the_index():
    assert ModelInfo(labels=("1", "0")).label_index("0") == 1


@pytest.mark.slow
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8, unique=True))
def test_every_name_finds_its_own_label(labels):
    info = ModelInfo(labels=tuple(labels))
    assert [info.label_index(name) for name in labels] == list(range(len(labels)))


@given(st.text())
def test_any_text_gives_an_index_or_an_input_error(text):
    try:
        assert 0 <= EMOJI64.label_index(text) <= 216
    except InputError as error:
        assert len(str(error).splitlines()) == 1

"""Labels in file names: safe on every system, and unique for each label of a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.requests.completion import Cell
from fastdiff.runs import names


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("noto animals", "noto-animals"),
        ("../../etc/passwd", "etc-passwd"),
        ("Ärger / Über_maß", "ärger-über-maß"),
        ("con", "con-"),
        ("🙂", "label"),
        ("a" * 300, "a" * 40),
        (7, "class7"),
    ],
    ids=["plain", "path", "letters", "windows-device", "no-letters", "long", "index"],
)
def test_slug(label, expected):
    assert names.slug(label) == expected


@given(st.text())
def test_a_slug_is_always_one_safe_part_of_a_name(label):
    part = names.slug(label)
    assert part and not set(part) & set('/\\:*?"<>|. \0\n') and len(part.encode()) <= 160


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("c", "c++", "d"), ["c", "c-1", "d"]),
        (("🙂", "🙃", "label"), ["label", "label-1", "label-2"]),
        (("A b", "a_B"), ["a-b", "a-b-1"]),
        (("straße", "strasse"), ["straße", "strasse-1"]),
        (("c", "c++", "c 1"), ["c", "c-1-1", "c-1"]),
        ((None, "class0"), ["class0", "class0-1"]),
        (("x" * 50, "x" * 60), ["x" * 40, "x" * 40 + "-1"]),
    ],
    ids=["signs", "emoji", "case", "casefold", "name-of-another", "unnamed", "long"],
)
def test_labels_whose_slugs_agree_have_names_of_their_own(labels, expected):
    info = ModelInfo(labels=labels)
    assert list(names.label_names(info).values()) == expected
    alone = [names.cell_names([Cell(7, index, info.label_name(index))], info) for index in range(len(labels))]
    assert alone == [[name] for name in expected], "the same name in every run"


@given(st.lists(st.text(min_size=1), unique=True))
def test_names_are_distinct_whatever_the_labels(labels):
    parts = names.label_names(ModelInfo(labels=tuple(labels)))
    slugs = [names.slug(label) for label in labels]
    assert len({part.casefold() for part in parts.values()}) == len(labels)
    folded = [slug.casefold() for slug in slugs]
    assert all(parts[i] == slug for i, slug in enumerate(slugs) if folded.count(slug.casefold()) == 1)


def test_a_label_beyond_the_list_has_a_name_too():
    assert names.cell_names([Cell(0, 5, 5)], ModelInfo(labels=("a",))) == ["class5"]
    assert names.cell_names([Cell(0, 5, 5)], ModelInfo(labels=("class5",))) == ["class5-5"]


def test_a_picture_that_a_group_and_its_member_ask_for_has_two_names():
    info = ModelInfo(labels=("tea", "tea 2"))
    cells = [Cell(7, 0, "tea"), Cell(8, 1, "tea 2"), Cell(7, 0, "tea"), Cell(8, 0, "tea"), Cell(7, 0, "tea")]
    assert names.cell_names(cells, info) == ["tea", "tea-2", "tea-3", "tea", "tea-4"]


def test_equal_prompts_have_a_name_each():
    cells = [Cell(seed, None, None, prompt) for prompt in ("a tea", "a tea", "a tea 2", "a tea") for seed in (1, 2)]
    each = ["a-tea", "a-tea-3", "a-tea-2", "a-tea-4"]
    assert names.cell_names(cells, ModelInfo()) == [name for name in each for _ in range(2)]


def test_pictures_without_labels_have_none():
    assert names.cell_names([Cell(1, None, None)], ModelInfo()) == [None]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (("a cat", "A dog!"), ["a-cat", "a-dog"]),
        (("a cat", "a cat!", "A  cat"), ["a-cat", "a-cat-e9372a", "a-cat-2a38e4"]),
        (("x" * 41, "x" * 42), ["x" * 40 + "-316459", "x" * 40 + "-2b2573"]),
        (("🙂", "", "prompt"), ["prompt-d06f15", "prompt-e3b0c4", "prompt"]),
        (("雪の山", "Größe"), ["雪の山", "größe"]),
        (("con",), ["con-"]),
    ],
    ids=["words", "signs", "long", "no-words", "letters", "windows-device"],
)
def test_prompts_have_names_of_their_own(prompts, expected):
    assert list(names.prompt_names(prompts).values()) == expected
    cells = [Cell(seed, None, None, prompt) for prompt in prompts for seed in (1, 2)]
    assert names.cell_names(cells, ModelInfo()) == [name for name in expected for _ in range(2)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True))
def test_names_are_distinct_and_safe_whatever_the_prompts(prompts):
    parts = names.prompt_names(prompts)
    assert list(parts) == prompts and len({part.casefold() for part in parts.values()}) == len(prompts)
    assert all(
        part and not set(part) & set('/\\:*?"<>|. \0\n') and len(part.encode()) <= 200 for part in parts.values()
    )

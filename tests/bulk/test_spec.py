"""Files of labels or prompts."""

import json
from dataclasses import replace

import pytest

from fastdiff.bulk.spec import Row, read_rows
from fastdiff.errors import InputError
from fastdiff.requests.defaults import BULK

ROWS = [{"label": 2, "seed": 5, "num_images": 2}, {"label": 0}, {"label": 1, "seed": 0}]
CSV = "label,seed,num_images\n2,5,2\n0,,\n1,0,\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(ROWS)),
        ("a.JSONL", "\n".join(map(json.dumps, ROWS)) + "\n\n"),
        ("a.csv", CSV),
        ("b.csv", "\ufeff" + CSV.replace("\n", "\r\n")),
    ],
)
def test_rows_are_drawn_in_their_order(tmp_path, make_plan, labelled, name, text):
    (tmp_path / name).write_bytes(text.encode())
    plan = make_plan(labelled, spec=str(tmp_path / name), seed=7, num_images=1)
    assert [(cell.label, cell.seed) for cell in plan.run.cells] == [(2, 5), (2, 6), (0, 7), (1, 0)]


def test_a_prompt_may_hold_commas_and_lines(tmp_path):
    (tmp_path / "a.csv").write_text('prompt\n"a cat, sitting\nand a ""dog"""\n', newline="")
    assert read_rows(str(tmp_path / "a.csv")) == [Row(prompt='a cat, sitting\nand a "dog"')]


def test_rows_of_prompts(tmp_path, make_plan, text_folder):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a fox", "seed": 9}\n{"prompt": "a cat"}\n')
    plan = make_plan(text_folder("sd1"), spec=str(tmp_path / "a.jsonl"), num_images=None)
    assert [(cell.prompt, cell.seed) for cell in plan.run.cells] == [("a cat", 0), ("a fox", 9), ("a cat", 0)]
    assert plan.run.request.prompt == ("a cat", "a fox")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "is not a .json, .jsonl or .csv file"),
        ("a.json", "{}", "it is not a list of objects"),
        ("a.json", "[", "cannot be read"),
        ("a.json", "[]", "has no rows"),
        ("a.json", "[1]", "row 1: 1 is not an object"),
        ("a.json", '[{"labels": 1}]', "row 1: unknown labels; a row has label, prompt, seed, num_images"),
        ("a.json", '[{"label": 1}, {"label": 1, "seed": -1}]', "row 2: seed: -1 is not"),
        ("a.json", '[{"label": 1, "prompt": "a"}]', "row 1: has both label and prompt; leave one out"),
        ("a.json", '[{"label": 1}, {}]', "some rows have no label or prompt"),
        ("a.json", '[{"seed": 1}]', "draws from labels, and no row has one; give each row a label"),
        ("a.json", '[{"label": 3}]', "label 3 is out of range"),
        ("a.json", '[{"prompt": "a"}]', "has no text encoder"),
        ("a.json", '[{"label": 1, "seed": 4294967295, "num_images": 2}]', "would exceed the last seed"),
        ("a.csv", "label,seed\n1,2,3\n", "a row has more or fewer values than the header"),
        ("a.csv", "label,seed\n1,x\n", "row 1: seed: 'x' is not"),
    ],
)
def test_refusals(tmp_path, make_plan, labelled, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        make_plan(labelled, spec=str(tmp_path / name), num_images=1)


def test_a_file_that_is_not_there(make_plan, labelled):
    with pytest.raises(InputError, match=r"spec no\.csv does not exist; give a \.json"):
        make_plan(labelled, spec="no.csv", num_images=1)


@pytest.mark.parametrize(
    ("request_", "message"), [({"label": (1,)}, "leave one out"), ({"seed": (1, 2)}, "takes a single seed")]
)
def test_flags_beside_it(tmp_path, make_plan, labelled, request_, message):
    (tmp_path / "a.csv").write_text(CSV)
    with pytest.raises(InputError, match=message):
        make_plan(labelled, spec=str(tmp_path / "a.csv"), **{"num_images": None} | request_)


def test_too_many_pictures(tmp_path, make_plan, labelled, monkeypatch):
    assert BULK.most_pictures == 1_000_000
    monkeypatch.setattr("fastdiff.bulk.spec.BULK", replace(BULK, most_pictures=1000))
    (tmp_path / "a.csv").write_text("label,num_images\n" + "0,50\n" * 21)
    with pytest.raises(InputError, match="more than 1000 pictures"):
        make_plan(labelled, spec=str(tmp_path / "a.csv"), num_images=1)

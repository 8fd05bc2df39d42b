"""The axes of a sheet: typed values, the record in a PNG, and the captions."""

import pytest

from fastdiff.errors import InputError
from fastdiff.ui.inputs.axes import Axes, Axis


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("seed", "7", (7,)),
        ("seed", "1, 5-7\n 9", (1, 5, 6, 7, 9)),
        ("steps", "5-20 (+5), 50", (5, 10, 15, 20, 50)),
        ("steps", "10-20 [3]", (10, 15, 20)),
        ("guidance_scale", "1, 2.5, .5", (1.0, 2.5, 0.5)),
        ("guidance_scale", "1-2 (+0.1)", (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0)),
        ("guidance_scale", "1-4 [4], 1e-05", (1.0, 2.0, 3.0, 4.0, 1e-05)),
        ("scheduler", "DDIM, euler-a,", ("ddim", "euler-a")),
        ("label", "noto birds, 3", ("noto birds", "3")),
        ("label", "tench, Tinca tinca\ngoldfish", ("tench, Tinca tinca", "goldfish")),
        ("prompt", "a cat, in oil\n\na dog", ("a cat, in oil", "a dog")),
    ],
)
def test_what_is_typed_is_read_and_written_back(name, text, values):
    axis = Axis.parse(name, text)
    assert axis.values == values and list(map(type, axis.values)) == list(map(type, values))
    assert Axis.parse(name, axis.text) == axis


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("seed", "", "seed: the axis has no values"),
        ("seed", "1.5", "seed: '1.5' is not a valid value; give whole numbers"),
        ("seed", "-1", "seed: '-1' is not a valid value"),
        ("seed", "4294967296", "seed: 4294967296 is not a whole number from 0"),
        ("seed", "0-4294967295", "is not an increasing range of at most 100 numbers"),
        ("steps", "0", "steps: 0 is not a whole number"),
        ("steps", "20-10", "not an increasing range"),
        ("steps", "1-9 (+0)", "not an increasing range"),
        ("steps", "1-9 [999999999]", "not an increasing range"),
        ("steps", "5, 1-9 (+2)", "steps: 5 is on the axis twice"),
        ("guidance_scale", "1e999", "guidance_scale: '1e999' is not a valid value"),
        ("guidance_scale", "nan", "guidance_scale: 'nan' is not a valid value"),
        ("guidance_scale", "1..2", "guidance_scale: '1..2' is not a valid value"),
        ("scheduler", "euler a", "scheduler: 'euler a' is not one of ddim"),
        ("label", " , ", "label: the axis has no values"),
        ("label", ",".join(map(str, range(101))), "values"),
        ("model", "a", "name: 'model' is not one of seed, steps"),
        ("seed", 7, "seed: 7 is not a list of values"),
        ({}, "7", "is not one of"),
    ],
)
def test_what_cannot_be_used_is_one_line(name, text, message):
    with pytest.raises(InputError, match=message) as refusal:
        Axis.parse(name, text)
    assert "\n" not in str(refusal.value)


def test_captions_name_what_a_number_is():
    assert Axis("seed", (7,)).captions == ["seed 7"]
    assert Axis("steps", (1, 20)).captions == ["1 step", "20 steps"]
    assert Axis("guidance_scale", (1.0, 2.5)).captions == ["guidance 1", "guidance 2.5"]
    assert Axis("label", (3, "noto birds")).captions == ["label 3", "noto birds"]


def test_settings_are_row_by_row_and_an_axis_may_be_left_out():
    steps, seeds = Axis("steps", (1, 2)), Axis("seed", (7, 8))
    assert Axes(steps, seeds).settings() == [
        {"steps": 1, "seed": 7}, {"steps": 2, "seed": 7}, {"steps": 1, "seed": 8}, {"steps": 2, "seed": 8},
    ]  # fmt: skip
    assert Axes(None, seeds).settings() == [{"seed": 7}, {"seed": 8}]
    assert not Axes()
    with pytest.raises(InputError, match="seed is on both axes"):
        Axes(seeds, seeds)


def test_axes_come_back_from_their_record():
    axes = Axes(Axis("guidance_scale", (1.0, 2.5)), Axis("prompt", ("a cat, in oil",)))
    assert Axes.from_record(axes.as_record(), "a.png") == axes
    assert Axes.from_record(Axes(None, axes.y).as_record(), "a.png") == Axes(None, axes.y)


@pytest.mark.parametrize(
    "record",
    [
        [],
        None,
        {"z": {"name": "seed", "values": [1]}},
        {"x": []},
        {"x": {"name": "seed"}},
        {"x": {"name": "seed", "values": []}},
        {"x": {"name": "seed", "values": 7}},
        {"x": {"name": "seed", "values": [[7]]}},
        {"x": {"name": "seed", "values": [7, -1]}},
        {"x": {"name": "seed", "values": [True]}},
        {"x": {"name": "seed", "values": list(range(101))}},
        {"x": {"name": "model", "values": ["/etc"]}},
        {"x": {"name": ["seed"], "values": [7]}},
        {"x": {"name": "seed", "values": [7], "more": 1}},
        {"x": {"name": "label", "values": [{}]}},
        {"x": {"name": "seed", "values": [7]}, "y": {"name": "seed", "values": [8]}},
    ],
)
def test_hostile_records_are_refused(record):
    with pytest.raises(InputError):
        Axes.from_record(record, "a.png")

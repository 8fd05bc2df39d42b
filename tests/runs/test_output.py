"""The files of a run: all are named and checked before drawing, and written with their settings."""

from pathlib import Path

import pytest
from PIL import Image

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Finished, Run, find_model
from fastdiff.runs.output import Output
from fastdiff.runs.sheet import ContactSheet

ASKED = Request(model="emoji64", label=(0, 1), seed=(7, 8))
RECORD = {
    "num_inference_steps": 2,
    "scheduler": "ddim",
    "guidance_scale": 2.0,
    "eta": 0.0,
    "model": "emoji64",
    "width": 8,
    "height": 6,
    "versions": {"fastdiff": "0"},
}


@pytest.fixture(scope="module")
def run():
    return Run.prepare(ASKED, find_model(ASKED), COMMAND)


def check(run, out, grid=False, overwrite=False) -> Output:
    return Output.check(run, str(out), overwrite=overwrite, grid=grid)


def test_a_folder_has_a_file_for_each_cell(run, tmp_path):
    output = check(run, tmp_path)
    labels = "fluent-3d-hearts", "fluent-3d-creatures"
    assert [path.name for path in output.paths] == [f"{label}-{seed}.png" for label in labels for seed in (7, 8)]
    assert (output.grid, output.columns) == (None, 2)


@pytest.mark.parametrize(("grid", "name"), [(True, "grid.png"), ("sheet.PNG", "sheet.PNG")])
def test_the_grid_lies_beside_the_pictures_or_where_it_is_named(run, tmp_path, monkeypatch, grid, name):
    monkeypatch.chdir(tmp_path)
    assert check(run, tmp_path, grid).grid in (tmp_path / name, Path(name))


@pytest.mark.parametrize(
    ("out", "grid", "message"),
    [
        ("{label}{seed}.png", "fluent-3d-hearts7.png", "the grid and a picture would both be"),
        ("pictures", "sheet.jpg", "--grid 'sheet.jpg' is not the name of a PNG"),
        ("pictures", "folder.png", "folder.png is a folder; choose another file with --grid"),
        ("old.png", False, "two pictures have the name"),
    ],
)
def test_refusals_come_before_a_picture_is_drawn(run, tmp_path, monkeypatch, out, grid, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.png").touch()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match=message):
        check(run, out, grid)


@pytest.mark.slow
def test_a_grid_that_nobody_could_open_is_refused(run, tmp_path):
    many = Request(model="emoji64", label=(0,), seed=tuple(range(40_000)))
    with pytest.raises(InputError, match=r"a grid of 40000 pictures would be .* leave out --grid"):
        check(Run.prepare(many, run.card, COMMAND), tmp_path, grid=True)


def test_a_grid_whose_prompts_no_png_could_hold_is_refused(text_folder, tmp_path):
    request = Request(prompt=tuple(f"{i} {'雪' * 9000}" for i in range(20)))
    run = Run.prepare(request, ModelCard.read("sd", text_folder("sd1")), COMMAND)
    assert len(check(run, tmp_path).paths) == 20
    with pytest.raises(InputError, match="--grid: the prompts are too long for the settings of one PNG; leave it out"):
        check(run, tmp_path, grid=True)


def test_a_grid_of_prompts_has_a_line_for_each(text_folder, tmp_path):
    request = Request(prompt=("a", "b", "c"), seed=(1, 2), height=32)
    run = Run.prepare(request, ModelCard.read("sd", text_folder("sd1")), COMMAND)
    output = check(run, tmp_path, grid=True)
    assert output.columns == 2
    assert [path.name for path in output.paths] == [f"{prompt}-{seed}.png" for prompt in "abc" for seed in (1, 2)]
    sheet, record = Image.new("RGB", (50, 100)), RECORD | {"prompt": "c", "label": None, "seed": 2}
    grid = png.read_settings(output.write_grid(output.grid, sheet, run, record))
    assert (grid["prompt"], grid["seed"], grid["label"]) == (["a", "b", "c"], [1, 2], None)
    assert (grid["width"], grid["picture_width"], grid["picture_height"]) == (50, 8, 6)


def finished(run, place, size=(8, 6), **settings) -> Finished:
    cell = run.cells[place]
    return Finished(
        place, cell, Image.new("RGB", size), RECORD | {"seed": cell.seed, "label": cell.label_name} | settings
    )


def test_pictures_and_grid_hold_their_settings(run, tmp_path):
    output = check(run, tmp_path / "new", grid=True)
    sheet = ContactSheet(len(run.cells), output.columns)
    for place in range(len(run.cells)):
        picture = finished(run, place)
        assert png.read_settings(output.write(picture)) == picture.record | {"schema": 1, "numerics": png.NUMERICS}
        sheet.paste(place, picture.image)
    grid = png.read_settings(output.write_grid(output.grid, sheet.image, run, picture.record))
    labels = ["fluent-3d hearts", "fluent-3d creatures"]
    assert (grid["seed"], grid["label"], grid["width"], grid["height"]) == ([7, 8], labels, 22, 18)


def test_a_name_that_another_process_took_meanwhile_is_left_to_it(run, tmp_path):
    output, other = check(run, tmp_path), check(run, tmp_path)
    path = tmp_path / "fluent-3d-hearts-7.png"
    assert other.write(finished(run, 0, num_inference_steps=3)) == path
    before = path.read_bytes()
    assert output.write(finished(run, 0)) == tmp_path / "fluent-3d-hearts-7-2.png"
    assert path.read_bytes() == before
    third = check(run, tmp_path / "third")
    assert third.write(finished(run, 1, versions={"fastdiff": "1"})).exists()
    assert check(run, tmp_path / "third").missing, "the record lacks settings"
    again = Output(third.paths)
    assert again.write(finished(run, 1)) == third.paths[1], "the same picture, of another version"
    assert [path.name for path in (tmp_path / "third").iterdir()] == ["fluent-3d-hearts-8.png"]


def test_a_grid_that_another_process_wrote_meanwhile_stays(run, tmp_path):
    output, record = check(run, tmp_path, grid=True), finished(run, 3).record
    sheet = Image.new("RGB", (22, 18))
    assert output.write_grid(output.grid, sheet, run, record) == tmp_path / "grid.png"
    assert output.write_grid(output.grid, sheet, run, record) == tmp_path / "grid.png"
    other = output.write_grid(output.grid, sheet, run, record | {"num_inference_steps": 3})
    assert other == tmp_path / "grid-2.png" and len(list(tmp_path.iterdir())) == 2


def test_numbers_never_make_the_name_of_another_picture(text_folder, tmp_path):
    request = Request(prompt=("cat", "cat-0"), seed=(0, 2), height=32)
    run = Run.prepare(request, ModelCard.read("sd", text_folder("sd1")), COMMAND)
    (tmp_path / "cat-0.png").touch()
    output = check(run, tmp_path)
    assert [path.name for path in output.paths] == ["cat-0-3.png", "cat-2.png", "cat-0-0.png", "cat-0-2.png"]
    assert output.notices() == [
        f"{tmp_path}/cat-0.png exists with other contents and stays; the new file is {tmp_path}/cat-0-3.png"
    ]
    (tmp_path / "cat-2.png").symlink_to(tmp_path / "nowhere.png")
    (line,) = check(run, tmp_path).notices()
    assert line.startswith("2 files exist with other contents and stay; the new files have numbers, such as ")

"""X/Y sheets: the pictures of Draw, captioned, in a PNG from which the sheet can be drawn again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.cli import main
from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.ui import drawing, sheet
from fastdiff.ui.drawing import draw, prepare
from fastdiff.ui.inputs.axes import Axes, Axis
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.parts.upload import read_record
from fastdiff.ui.sheet import draw_captions, draw_sheet, prepare_sheet

LIMITS = Limits(pictures=6, steps=50, side=128, batch_size=2)


@pytest.fixture
def draw_at(shared, tmp_path):
    """Draw a sheet into a folder of this name. Returns its progress and its pictures; the sheet is the last."""

    def drawn_sheet(name: str, options: UncheckedRequest, axes: Axes):
        steps = list(draw_sheet(prepare_sheet(options, axes, shared, LIMITS), shared, tmp_path / name))
        return [at for at, _ in steps], [each for _, drawn in steps for each in drawn]

    return drawn_sheet


CASES = [
    pytest.param(
        UncheckedRequest(label="noto birds", seed=3),
        Axis("steps", (2, 1)),
        Axis("guidance_scale", (1.0, 2.5)),
        id="sampling",
    ),
    pytest.param(
        UncheckedRequest(label="noto smileys", steps=1),
        Axis("seed", (4, 6, 5)),
        None,
        id="the labels of a group take turns",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        UncheckedRequest(label="noto birds", steps=1, scheduler="euler", width=72, eta=None),
        Axis("label", ("Twemoji/Fruit", "noto birds")),
        Axis("scheduler", ("euler", "ddim")),
        id="names and schedulers",
    ),
    pytest.param(
        UncheckedRequest(label="noto birds", steps=2, scheduler="ddim", eta=0.5),
        None,
        Axis("scheduler", ("euler", "ddim")),
        id="eta of ddim alone",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        UncheckedRequest(model="./text/sd1", prompt="the cat", negative_prompt="ocean", steps=1),
        Axis("prompt", ("the cat, a photo", "the dog")),
        Axis("seed", (1, 2)),
        id="prompts",
    ),
]


@pytest.mark.parametrize(("options", "x", "y"), CASES)
def test_a_sheet_has_the_pictures_of_draw_and_draws_itself_again(draw_at, shared, tmp_path, options, x, y):
    axes = Axes(x, y)
    _, (*drawn, sheet) = draw_at("sheet", options, axes)
    alone = [draw_alone(options, settings, shared, tmp_path / str(i)) for i, settings in enumerate(axes.settings())]
    assert sorted(path.read_bytes() for path in alone) == sorted(each.path.read_bytes() for each in drawn)
    with Image.open(sheet.path) as image:
        assert all(has_inside(np.asarray(image), path) for path in alone)
    assert sheet.path.name == "sheet.png" and {
        "schema": 1,
        "numerics": png.NUMERICS,
        **sheet.record,
    } == png.read_settings(sheet.path)
    restored = read_record(sheet.path, LIMITS)
    _, (*_, again) = draw_at("again", UncheckedRequest.from_record(restored), restored["axes"])
    assert again.path.read_bytes() == sheet.path.read_bytes()


def draw_alone(options: UncheckedRequest, settings: dict, shared, folder: Path) -> Path:
    """Return the picture that Draw makes of the options with other settings."""
    settings = settings | ({"eta": None} if settings.get("scheduler") == "euler" else {})
    *_, (_, [picture]) = draw(prepare(replace(options, **settings), shared, LIMITS), shared, folder)
    return picture.path


def has_inside(sheet: np.ndarray, path: Path) -> bool:
    """Return whether a sheet contains the pixels of a picture."""
    with Image.open(path) as image:
        picture = np.asarray(image)
    height, width = picture.shape[:2]
    corners = np.argwhere((sheet[: 1 - height or None, : 1 - width or None] == picture[0, 0]).all(-1))
    return any(np.array_equal(sheet[y : y + height, x : x + width], picture) for y, x in corners)


def test_pictures_are_in_their_columns_and_rows_and_captions_are_written():
    pictures = [Image.new("RGB", (64, 48), (40 * i, 0, 0)) for i in range(6)]
    sheet = np.asarray(draw_captions(pictures, ["1 step", "2 steps", "a name that is rather long"], ["seed 1", "b"]))
    centres = [tuple(map(round, np.argwhere((sheet == (40 * i, 0, 0)).all(-1)).mean(0))) for i in range(1, 6)]
    rows, columns = [y for y, _ in centres], [x for _, x in centres]
    assert len({*rows[:2]}) == 1 and len({*rows[2:]}) == 1 and rows[0] < rows[2]
    assert columns[0] == columns[3] < columns[1] == columns[4] and columns[2] < columns[0]
    above, beside = sheet[: rows[0] - 30], sheet[:, : columns[2] - 40]
    assert (above < 128).any() and (beside < 128).any()
    plain = np.asarray(draw_captions(pictures[:1], [""], [""]))
    assert plain.shape[0] < 48 + 20 and plain.min() == 0 and np.unique(plain).tolist() == [0, 255]


def test_a_long_caption_is_cut_and_stays_in_its_column():
    picture = Image.new("L", (64, 64), 255)
    sheet = draw_captions([picture, picture], ["word " * 200, "unbreakable" * 50], ["word " * 200])
    assert sheet.mode == "L" and sheet.width < 600 and sheet.height < 300


def test_progress_counts_the_steps_of_all_pictures(draw_at, monkeypatch):
    monkeypatch.setattr(drawing, "INTERVAL", 0)  # report every step, however fast it is
    options = UncheckedRequest(label="noto birds", batch_size=2)
    at, _ = draw_at("a", options, Axes(Axis("steps", (1, 3)), Axis("seed", (1, 2))))
    assert [each.fraction for each in at] == pytest.approx([2 / 8, 4 / 8, 6 / 8, 1, 1])
    assert [(each.places.start, each.places.stop) for each in at] == [(0, 2), (2, 4), (2, 4), (2, 4), (2, 4)]
    assert len(at[0].run.cells) == 4


def test_a_sheet_is_held_to_the_limits_of_a_request(shared, monkeypatch, draw_at):
    options = UncheckedRequest(label="noto birds")
    with pytest.raises(InputError, match="a sheet of 4 x 2 = 8 pictures is too large; the limit is 6"):
        prepare_sheet(options, Axes(Axis("seed", (1, 2, 3, 4)), Axis("steps", (1, 2))), shared, LIMITS)
    with pytest.raises(InputError, match="steps: 51 is not a whole number from 1 to 50"):
        prepare_sheet(options, Axes(Axis("steps", (1, 51))), shared, LIMITS)
    draw_at("measured", options, Axes(Axis("steps", (3,))))
    axes = Axes(Axis("steps", (40, 41)), Axis("seed", (1, 2, 3)))
    known = shared.budget._known_seconds(prepare(options, shared, LIMITS))
    monkeypatch.setattr(shared.budget, "minutes", known * 200 / 60)  # each picture alone fits
    with pytest.raises(InputError, match="this would take about"):
        prepare_sheet(options, axes, shared, LIMITS)


def test_the_command_says_in_one_line_that_it_draws_no_sheets(draw_at, tmp_path, capsys):
    _, drawn = draw_at("a", UncheckedRequest(label="noto birds", steps=1), Axes(Axis("seed", (1, 2))))
    assert main(["sample", "--from", str(drawn[-1].path), "-o", str(tmp_path / "out")]) == 2
    assert "is an X/Y sheet" in capsys.readouterr().err
    assert main(["info", str(drawn[-1].path)]) == 0
    assert 'X Type: Seed, X Values: "1, 2"' in capsys.readouterr().out


def captioned(text: str) -> bytes:
    return draw_captions([Image.new("RGB", (16, 16))], [""], [text]).tobytes()


def test_captions_have_accents_and_other_letters_and_boxes_for_the_rest():
    assert captioned("façade") == captioned("fac\u0327ade") != captioned("facade")
    assert captioned("猫") == captioned("犬") != captioned("?")
    assert len({captioned(text) for text in ("猫", "я", "λ", "a")}) == 4


def test_captions_without_gradios_font(monkeypatch):
    monkeypatch.setattr(sheet, "_FONT", "missing.woff2")
    assert captioned("a") != captioned("é") == captioned("猫")


def test_a_sheet_with_a_random_seed_has_one_for_all_pictures(shared):
    sheet = prepare_sheet(UncheckedRequest(seed=-1), Axes(Axis("steps", (1, 2, 3))), shared, LIMITS)
    assert len({cell.seed for run in sheet.runs for cell in run.cells}) == 1

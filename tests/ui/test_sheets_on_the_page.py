"""Sheets and grids through the events of the page: drawn, dropped onto the page again, and in History."""

import shutil
from pathlib import Path

import pytest

from fastdiff.cli import main
from fastdiff.requests import png
from fastdiff.ui.parts.request import Limits

pytestmark = pytest.mark.slow

FIELDS = {"Steps": 1, "Seed": 5, "Style": "noto", "Group": "birds"}
SHEET = {"X: columns": "steps", "X values": "1, 2", "Y: rows": "seed", "Y values": "4-5"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def server(shared, serve, outputs):
    """The address of a page that this module's tests share. Its pictures are in `outputs`."""
    with serve(shared, Limits(), outputs=outputs) as address:
        yield address


def draw(page, **fields) -> str:
    return page.draw(**fields).replace("\\", "")


def drop(page, path: Path) -> tuple[str, dict]:
    """Drop a PNG onto the page. Returns the status text, and the new values of the fields by label."""
    (uploaded,) = page.http.post("/gradio_api/upload", files={"files": (path.name, path.read_bytes())}).json()
    result = page.restore({"path": uploaded, "meta": {"_type": "gradio.FileData"}})
    values = {}
    for key, update in zip(page.event("upload", "upload")["outputs"], result["output"]["data"], strict=True):
        label, is_update = page.components[key]["props"].get("label"), isinstance(update, dict)
        if label and not (is_update and "value" not in update):
            values[label] = update["value"] if is_update else update
    return str(result["output"]["data"]), values


def newest(outputs: Path, name: str) -> Path:
    return max(outputs.rglob(name), key=lambda path: path.stat().st_mtime_ns)


def captions(page) -> list[str]:
    """Return the pictures of History's first page."""
    gallery = page.call(page.event("history-tab", "select"), [None, 1])["output"]["data"][3]
    return [each["caption"] for each in gallery["value"]]


def test_a_sheet_that_is_dropped_on_the_page_draws_itself_again(visit, outputs):
    page = visit()
    assert "Drew 4 pictures and their sheet" in draw(page, **FIELDS, **SHEET)
    sheet = newest(outputs, "sheet.png")
    assert len(list(sheet.parent.iterdir())) == 5
    assert "sheet of steps 1, 2 x seed 4, 5" in captions(page)
    other = visit()
    said, values = drop(other, sheet)
    assert "Loaded the settings of sheet.png, and its axes" in said
    assert values | SHEET | {"Y values": "4, 5"} == values and values["Group"] == "birds"
    assert "Drew 4 pictures and their sheet" in draw(other, **values)
    again = newest(outputs, "sheet.png")
    assert again != sheet and again.read_bytes() == sheet.read_bytes()
    _, values = drop(other, next(path for path in sheet.parent.iterdir() if path != sheet))
    assert values["X: columns"] == values["Y: rows"] == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"X values": "1, x"}, "Steps: 'x' is not a valid value; give whole numbers", id="values"),
        pytest.param({"Y: rows": "steps"}, "Steps is on both axes", id="one axis twice"),
        pytest.param({"Y values": "1-40"}, "a sheet of 2 x 40 = 80 pictures is too large", id="too many pictures"),
        pytest.param({"X: columns": ["steps"]}, "is not one of seed", id="a list as name"),
    ],
)
def test_what_the_page_says_of_axes_that_cannot_be(visit, fields, message):
    assert message in draw(visit(), **FIELDS, **SHEET | fields)


def test_a_run_is_saved_as_the_grid_that_the_command_makes(visit, outputs, tmp_path):
    page = visit()
    assert "Drew 3 pictures" in draw(page, **FIELDS, Pictures=3)
    saved = page.call(page.event("save-grid", "click"), [None])
    grid = newest(outputs, "grid.png")
    assert str(grid) in str(saved["output"])
    command = ["sample", "--label", "noto birds", "-s", "5", "--num-images", "3", "--steps", "1", "--device", "cpu"]
    assert main([*command, "--grid", "-o", str(tmp_path)]) == 0
    assert grid.read_bytes() == (tmp_path / "grid.png").read_bytes()
    assert png.read_settings(grid)["seed"] == [5, 6, 7]
    assert "grid of seeds 5, 6, 7" in captions(page)
    said, values = drop(page, grid)
    assert "Loaded the settings of grid.png" in said and (values["Pictures"], values["Seed"]) == (3, 5)
    next(path for path in grid.parent.iterdir() if path != grid).unlink()
    refused = page.call(page.event("save-grid", "click"), [None])
    assert "a picture of this run was deleted" in str(refused["output"])


def test_a_run_is_saved_as_a_zip_of_its_files(visit, outputs, tmp_path):
    page = visit()
    draw(page, **FIELDS, **SHEET)
    saved = page.call(page.event("save-zip", "click"), [None])
    assert "Saved 5 pictures as a ZIP" in str(saved["output"])
    shutil.unpack_archive(saved["output"]["data"][0]["path"], tmp_path)
    files = {path.name: path.read_bytes() for path in newest(outputs, "sheet.png").parent.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    newest(outputs, "sheet.png").unlink()
    assert "a picture of this run was deleted" in str(page.call(page.event("save-zip", "click"), [None])["output"])


@pytest.mark.parametrize("button", ["save-grid", "save-zip"])
def test_there_is_nothing_to_save_before_a_run(visit, button):
    page = visit()
    assert "no run to save" in str(page.call(page.event(button, "click"), [None])["output"])


@pytest.mark.slow
def test_a_sheet_and_a_grid_of_history_fill_form_and_compare(visit, outputs):
    page = visit()
    draw(page, **FIELDS, Pictures=2)
    page.call(page.event("save-grid", "click"), [None])
    draw(page, **FIELDS, **SHEET)
    places = {caption.split()[0]: place for place, caption in enumerate(captions(page)[:10])}
    for kind, said in (("sheet", "Loaded the settings of sheet.png, and its axes"), ("grid", "of grid.png")):
        clicked = page.event("history", "select")
        body = {"data": [None] * len(clicked["inputs"]), "fn_index": clicked["id"], "session_hash": page.session_hash}
        body["event_data"] = {"index": places[kind], "value": None}
        assert page.http.post("/gradio_api/queue/join", json=body).status_code == 200
        assert any(each["msg"] == "process_completed" and each["success"] for each in page.messages())
        use, send = (click_in_history(page, text) for text in ("Use these settings", "Send to Compare"))
        assert said in str(page.call(use, [None])["output"])
        assert f"have the settings of seed {4 if kind == 'sheet' else 5}" in str(page.call(send, [None])["output"])


def click_in_history(page, text: str) -> dict:
    """Return the click event of the page's last button with this text."""
    key = [key for key, each in page.components.items() if each["props"].get("value") == text][-1]
    events = page.config["dependencies"]
    return next(each for each in events if each["backend_fn"] and [key, "click"] in map(list, each["targets"]))

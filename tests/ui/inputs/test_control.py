"""ControlNets on the page: the command's bytes, edges of the run's size, and settings that come back."""

import base64
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.edges import canny_picture
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue, controlnets
from fastdiff.hosting.models import Models
from fastdiff.requests import png
from fastdiff.ui.drawing import Drawn, draw, prepare, write_grid
from fastdiff.ui.inputs.axes import Axes, Axis
from fastdiff.ui.parts.request import UncheckedRequest
from fastdiff.ui.shared import Shared
from fastdiff.ui.sheet import draw_sheet, prepare_sheet
from fastdiff.ui.starting import larger
from tests.ui.history.unserved import upload
from tests.ui.inputs.conftest import ASKED, LIMITS, png_file
from tests.ui.inputs.test_mask import mask_file

pytestmark = pytest.mark.usefixtures("one_thread")
NET, FILE, TAB, EVENTS = "./nets/edges", "./single/lines.safetensors", "DrawTab.", "Starting."
CANNY = {"control": NET, "control_preprocessor": "canny", "canny_low": 300, "canny_high": 900}
FLAGS = ("--control", NET, "--control-image", "edges.png", "--embed-inputs")


@pytest.fixture(scope="module")
def models_dir(controlled_dir) -> Path:
    return controlled_dir


@pytest.fixture(scope="module")
def shared(models_dir) -> Shared:
    return Shared(Models(models_dir, device="cpu"))


@pytest.fixture(scope="module")
def catalogue(shared) -> Catalogue:
    return shared.catalogue


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_those_that_fit_the_model_are_on_offer(catalogue, form):
    sd1, sdxl, labels = map(catalogue.card, ("./text/sd1", "./text/sdxl", "emoji64"))
    assert [*catalogue.controlnets.offered(sd1)] == ["./nets/depth", NET, FILE]
    assert not catalogue.controlnets.offered(sdxl) and not catalogue.controlnets.offered(labels)
    assert not [name for name in catalogue.left_out() if "nets" in name or name == FILE]
    data = {field: field.value for field in form.components} | {form.control.fields.control: NET}
    assert form.control.box.visible and not form.control.fit(sdxl, data)[form.control.box]["visible"]
    assert form.control.fit(sdxl, data)[form.control.fields.control]["value"] == ""
    assert form.control.fit(sd1, data)[form.control.fields.control]["value"] == NET


def test_a_bundled_controlnet_is_on_offer_for_its_model(as_bundled):
    with as_bundled():
        catalogue = Catalogue()
        assert [*catalogue.controlnets.offered(catalogue.card("emoji-sd"))] == ["emoji-edges"]


def test_the_edges_of_a_picture_draw_the_commands_bytes(picture, command, apple):
    own = {"control_scale": 0.6, "control_start": 0, "control_end": 0.8, "guess_mode": True}
    mine = picture(control_image=apple, guidance_scale=4.0, **CANNY, **own)
    edges = png.read_input(mine.path, "control-image")
    expected = canny_picture(opened(png_file()), 300, 900)
    assert opened(edges).tobytes() == expected.tobytes() and np.asarray(expected).any()
    flags = [*FLAGS, "--cfg-scale", "4", "--control-scale", "0.6", "--control-end", "0.8", "--guess-mode"]
    assert mine.path.read_bytes() == command(*flags, files={"edges.png": edges}).read_bytes()
    assert mine.record["control"] == [NET] and mine.record["control_image"] == ["edges.png"]
    assert picture(control_image=apple, **CANNY | own | {"guess_mode": False}).path.read_bytes() != (
        mine.path.read_bytes()
    )


def test_a_picture_as_it_is_beside_a_start_and_a_mask_draws_the_commands_bytes(picture, command, apple):
    own = {"control": NET, "control_image": upload(png_file(seed=3), "edges.png"), "control_preprocessor": "none"}
    mine = picture(init_image=apple, mask=upload(mask_file(), "mouth.png"), strength=0.8, **own)
    files = {"edges.png": png_file(seed=3), "mouth.png": mask_file()}
    flags = ["--init-image", "apple.png", "--strength", "0.8", "--mask", "mouth.png"]
    assert mine.path.read_bytes() == command(*FLAGS, *flags, files=files).read_bytes()
    assert mine.record["control_scale"] == [0.5], "the default with a mask"


def test_a_single_file_draws_the_commands_bytes(picture, command, upload_folder):
    mine = picture(control=FILE, control_image=upload(png_file(seed=3), "edges.png"), control_scale=0.9)
    flags = ("--control", FILE, "--control-image", "edges.png", "--control-scale", "0.9", "--embed-inputs")
    assert mine.path.read_bytes() == command(*flags, files={"edges.png": png_file(seed=3)}).read_bytes()


def test_headers_are_read_once(models_dir, monkeypatch):
    catalogue = Catalogue(models_dir)
    card, read = catalogue.card("./text/sd1"), controlnets.checked_header
    paths = []
    monkeypatch.setattr(controlnets, "checked_header", lambda path: paths.append(path) or read(path))
    assert catalogue.controlnets.offered(card) == catalogue.controlnets.offered(card)
    assert len(paths) == 1


def test_edges_have_the_size_of_the_run(picture, upload_folder):
    """Edges of a large picture, one pixel wide, would fade in a resize."""
    photo = upload(png_file((256, 192)), "photo.png")
    edges = opened(png.read_input(picture(control_image=photo, **CANNY).path, "control-image"))
    small = opened(png_file((256, 192))).resize((64, 48), Image.Resampling.LANCZOS)
    assert edges.size == (64, 48) and edges.tobytes() == canny_picture(small, 300, 900).tobytes()
    free = picture(control_image=upload(png_file((40, 24)), "photo.png"), **CANNY, width=None, height=None)
    assert (free.record["width"], free.record["height"]) == (40, 24)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_pictures_of_any_mode_have_edges(shared, upload_folder, mode, recwarn):
    buffer = io.BytesIO()
    opened(png_file()).convert("L" if mode == "I;16" else mode).convert(mode).save(buffer, "tiff")
    asked = UncheckedRequest(**ASKED, **CANNY, control_image=upload(buffer.getvalue(), "a.tiff"))
    assert prepare(asked, shared, LIMITS).cells[0].control.pictures[0].size == (48, 64)
    assert not recwarn


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"control": NET}, "control_image: the ControlNet reads a picture; drop one"),
        ({"control_image": None, "control_scale": 1.0}, "control_scale: it is for a ControlNet; choose one"),
        (CANNY | {"canny_low": 901}, "canny_low 901: it is above the high threshold, 900"),
        ({"control": "./nets/wide"}, "control: './nets/wide' is not on offer for ./text/sd1; choose one of ./nets/d"),
        ({"control": "/etc"}, "control: '/etc' is not on offer"),
        ({"control": NET, "model": "./text/sdxl"}, "on offer for ./text/sdxl; choose none"),
        ({"control": NET, "control_image": b"GIF89a"}, "control-image 'a.png'"),
        (CANNY | {"control_image": b"GIF89a"}, "control-image 'a.png'"),
        (CANNY | {"control_image": png_file()[:-40]}, "control-image 'a.png': its data cannot be read"),
        ({"control": NET, "control_image": "/etc/passwd"}, "control_image: this file was not uploaded"),
        (CANNY | {"canny_high": 5000}, "canny_high: 5000 is not a whole number from 0 to 2040"),
        ({"control": NET, "control_scale": float("nan")}, "control_scale: nan is not a number from -100 to 100"),
        ({"control": NET, "control_start": 0.5, "control_end": 0.5}, "control-end 0.5: it is not after"),
        ({"control": 7}, "control: 7 is not a name"),
        ({"control": NET, "control_preprocessor": "depth"}, "'depth' is not one of none, canny"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(shared, upload_folder, asked, message):
    data = asked.get("control_image", png_file())
    given = upload(data, "a.png") if isinstance(data, bytes) else data
    given = None if message.startswith("control_image: the") else given
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as refusal:
        prepare(UncheckedRequest(**ASKED | asked | {"control_image": given}), shared, LIMITS)
    assert "\n" not in str(refusal.value) and str(upload_folder) not in str(refusal.value)


def test_damaged_weights_are_one_line_and_the_next_picture_is_the_same(models_dir, tmp_path, upload_folder):
    shutil.copytree(models_dir, tmp_path / "models")
    own, asked = Shared(Models(tmp_path / "models", device="cpu")), UncheckedRequest(**ASKED)
    (first,) = [each for _, some in draw(prepare(asked, own, LIMITS), own, tmp_path / "a") for each in some]
    controlled = UncheckedRequest(**ASKED, control=NET, control_image=upload(png_file(), "apple.png"))
    weights = tmp_path / "models" / "nets" / "edges" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(InputError) as refusal:
        [*draw(prepare(controlled, own, LIMITS), own, tmp_path / "b")]
    assert str(refusal.value).startswith(NET) and str(tmp_path) not in str(refusal.value)
    (second,) = [each for _, some in draw(prepare(asked, own, LIMITS), own, tmp_path / "c") for each in some]
    assert first.path.read_bytes() == second.path.read_bytes()


def test_grids_and_sheets_hold_the_control_picture(shared, apple, tmp_path):
    asked = UncheckedRequest(**ASKED | {"num_images": 2}, **CANNY, control_image=apple)
    run = prepare(asked, shared, LIMITS)
    drawn = [each for _, some in draw(run, shared, tmp_path / "run") for each in some]
    edges = png.read_input(drawn[0].path, "control-image")
    for picture in run.cells[0].control.pictures:
        Path(picture.name).unlink()
    grid = write_grid(run, drawn)
    assert png.read_input(grid, "control-image") == edges and png.read_settings(grid)["control"] == [NET]
    sheet = prepare_sheet(UncheckedRequest(**ASKED, **CANNY, control_image=apple), _AXES, shared, LIMITS)
    cells = [each for _, some in draw_sheet(sheet, shared, tmp_path / "sheet") for each in some]
    assert png.read_input(cells[-1].path, "control-image") == edges


_AXES = Axes(Axis("seed", (1, 2)), None)


def test_a_larger_picture_keeps_its_control(catalogue, picture, apple):
    drawn = picture(control_image=apple, **CANNY)
    asked = larger(drawn, catalogue, LIMITS)
    assert (asked.control, asked.upscale) == (NET, 1.5) and Path(asked.control_image).name == "edges.png"
    masked = picture(control_image=apple, **CANNY, init_image=apple, mask=upload(mask_file(), "mouth.png"))
    again = larger(masked, catalogue, LIMITS)
    assert again.control == NET and Path(again.control_image).is_file() and again.mask is None


def test_the_settings_of_a_picture_bring_its_control_back(page, picture, apple):
    drawn = picture(control_image=apple, **CANNY, control_scale=0.6, control_end=0.8)
    page.choose(f"{TAB}use", drawn)
    said = page.press(f"{TAB}use")
    assert "edges.png" in said and "not restored" not in said and '"value":0.6' in said and '"value":"none"' in said
    lone = drawn.path.with_name("lone.png")
    lone.write_bytes(png.without_inputs(drawn.path))
    page.choose(f"{TAB}use", Drawn(lone, drawn.record))
    said = page.press(f"{TAB}use")
    assert "not restored: the control picture edges.png, which is not inside lone.png" in said


def test_of_several_controlnets_the_first_comes_back(page, command):
    second = ("--control", "./nets/depth", "--control-image", "apple.png")
    drawn = command(
        *FLAGS, *second, "--control-scale", "0.7", "--control-scale", "0.2", files={"edges.png": png_file()}
    )
    dropped = {"Drop a picture anywhere to load its settings": upload(drawn.read_bytes(), "d.png")}
    said = page.press(f"{TAB}restore", dropped)
    assert "Loaded the settings of d.png; not restored: depth, because the page draws with one ControlNet" in said
    assert "edges.png" in said and '"value":0.7' in said and '"value":0.2' not in said


@pytest.mark.parametrize("change", ["renamed", "gone"])
def test_a_controlnet_is_found_by_its_hash(models_dir, catalogue, change):
    weights = models_dir / "nets" / "edges" / "diffusion_pytorch_model.safetensors"
    digits = file_hash(weights) if change == "renamed" else "0" * 64
    record = {"control": "/home/me/lines", "control_hash": digits, "control_scale": 0.5}
    found, lines = catalogue.controlnets.here(record, "a.png", catalogue.card("./text/sd1"))
    assert found["control"] == (NET if change == "renamed" else None)
    assert [*found.values()].count(0.5) == (change == "renamed")
    told = "not restored: the ControlNet lines, which is not here by name or hash"
    assert lines == ([] if change == "renamed" else [told])


def test_a_dropped_control_picture_sets_the_size_and_chooses_a_controlnet(page):
    own = {"Control picture": upload(png_file((48, 40)), "a.png"), "Model": "./text/sd1"}
    said = page.press(f"{EVENTS}begin_control", own)
    assert "./nets/depth follows a.png." in said and '"value":48' in said and '"value":40' in said
    said = page.press(f"{EVENTS}begin_control", own | {"ControlNet": NET, "Start picture": own["Control picture"]})
    assert f"{NET} follows a.png." in said and '"value":48' not in said
    said = page.press(f"{EVENTS}begin_control", own | {"Control picture": upload(b"no picture", "b.png")})
    assert "Control picture 'b.png' is not a picture" in said
    said = page.press(f"{EVENTS}end_control", own | {"ControlNet": NET})
    assert NET not in said and '"value":16' in said


def test_the_preview_is_the_control_picture(page, picture, apple):
    own = {"Control picture": apple, "Width": 64, "Height": 48, "Low threshold": 300, "High threshold": 900}
    edges = png.read_input(picture(control_image=apple, **CANNY).path, "control-image")
    assert base64.b64encode(edges).decode() in page.press(f"{EVENTS}preview", own)
    assert page.press(f"{EVENTS}preview", own | {"Preprocessor": "none"}) == '[""]'
    assert page.press(f"{EVENTS}preview", own | {"Control picture": None}) == '[""]'
    said = page.press(f"{EVENTS}preview", own | {"High threshold": 100})
    assert "Low threshold 300: it is above the high threshold, 100" in said


def test_what_is_gone_leaves_the_form(form, upload_folder):
    there = {"control": NET, "control_image": upload(png_file(), "a.png")["path"], "control_scale": 0.5}
    assert form.known_files(UncheckedRequest("./text/sd1", prompt="", **there)).control_scale == 0.5
    for gone in ({"control": "./nets/none"}, {"control_image": "/etc/passwd"}):
        left = form.known_files(UncheckedRequest("./text/sd1", prompt="", **there | gone))
        assert left.control is left.control_image is left.control_scale is None


def test_compare_says_what_only_draw_has(page, picture, apple):
    page.choose("CompareTab.send", picture(control_image=apple, **CANNY, control_scale=0.5))
    assert "Not restored: ControlNet, Control picture, Control scale." in page.press("CompareTab.send")

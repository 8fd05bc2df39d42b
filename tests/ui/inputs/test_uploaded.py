"""Uploads as start pictures: a path opens nothing else, PNGs hold one start each, hostile files end in one line."""

import io
from pathlib import Path

import pytest
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.ui.drawing import prepare
from fastdiff.ui.gallery import _before
from fastdiff.ui.inputs.uploaded import keep, keep_drawn, keep_inputs
from fastdiff.ui.parts.request import UncheckedRequest
from tests.ui.history.unserved import upload
from tests.ui.inputs.conftest import ASKED, LIMITS, png_file

pytestmark = pytest.mark.usefixtures("one_thread")


def saved(size: tuple[int, int] = (16, 16), kind: str = "png", **options) -> bytes:
    buffer = io.BytesIO()
    Image.new(options.pop("mode", "RGB"), size).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "is not a picture that PIL reads", id="empty"),
        pytest.param(b"GIF89a", "init-image 'a.png'", id="a header alone"),
        pytest.param(saved()[:-30], "init-image 'a.png': its data cannot be read", id="truncated"),
        pytest.param(saved((20_000, 1)), "each side must be at most", id="20,000 wide"),
        pytest.param(saved((1, 1), mode="CMYK", kind="tiff"), None, id="1 pixel of CMYK"),
    ],
)
def test_a_hostile_picture_ends_in_one_line_or_a_picture(shared, upload_folder, data, message):
    asked = UncheckedRequest(**ASKED, init_image=upload(data, "a.png"))
    if message is None:
        assert prepare(asked, shared, LIMITS).cells[0].start.strength == 0.8
        return
    with pytest.raises(InputError, match=message) as refusal:
        prepare(asked, shared, LIMITS)
    assert "\n" not in str(refusal.value) and str(upload_folder) not in str(refusal.value)


def test_a_large_picture_does_not_make_a_large_one(shared, upload_folder):
    sizes = {name: None for name in ("width", "height")}
    asked = UncheckedRequest(**ASKED | sizes, init_image=upload(saved((2000, 500)), "a.png"))
    assert prepare(asked, shared, LIMITS).size == (32, 8)
    asked = UncheckedRequest(**ASKED | {"width": None}, init_image=upload(saved((70, 20)), "a.png"))
    assert prepare(asked, shared, LIMITS).size == (70, 48)


def test_a_path_opens_uploads_alone(shared, upload_folder, tmp_path):
    """Not the drawn pictures of any user, which the server could read."""
    theirs = tmp_path / "outputs" / "2026-01-01" / "a.png"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(png_file())
    (upload_folder / "0123").mkdir()
    (upload_folder / "0123" / "link.png").symlink_to(theirs)
    for path in (str(theirs), str(upload_folder / "0123" / "link.png"), "/etc/passwd", "x" * 5000, "\0", "", 7, ["x"]):
        for payload in (path, {"path": path, "meta": {"_type": "gradio.FileData"}}):
            with pytest.raises(InputError, match=r"^init_image: "):
                prepare(UncheckedRequest(**ASKED, init_image=payload), shared, LIMITS)


@pytest.mark.parametrize("name", ["../../evil.png", "..", "", "/", "a\0b", "x" * 999])
def test_a_name_chooses_no_folder(upload_folder, name):
    path = keep(b"data", name, LIMITS.uploads)
    assert path.parent.parent == upload_folder.resolve() and path.read_bytes() == b"data"


def test_a_full_space_for_uploads_is_said(upload_folder):
    first = keep(b"12345", "a.png", 10)
    assert keep(b"12345", "a.png", 10) == first
    with pytest.raises(InputError, match="space for uploads is full; try again later"):
        keep(b"123456", "b.png", 10)


def test_a_drawn_picture_as_a_start_leaves_its_own_start_behind(picture, apple):
    first = picture(init_image=apple, strength=0.4)
    copy = keep_drawn(first.path, LIMITS.uploads)
    assert png.read_input(first.path, "init-image") is not None and png.read_input(copy, "init-image") is None
    assert png.read_settings(copy) == png.read_settings(first.path)
    with Image.open(copy) as one, Image.open(first.path) as other:
        assert one.tobytes() == other.tobytes()
    second = picture(init_image=str(copy), strength=0.4)
    assert png.read_input(second.path, "init-image") == copy.read_bytes()
    assert second.record["init_image"] == first.path.name


def test_a_start_that_is_not_inside_the_png_is_named(picture, apple, upload_folder):
    drawn = picture(init_image=apple, strength=0.4)
    kept, lines = keep_inputs(drawn.path, drawn.record, LIMITS.uploads)
    assert not lines and Path(kept["init_image"]).name == "apple.png"
    assert Path(kept["init_image"]).read_bytes() == png_file()
    other = drawn.record | {"init_image": "/home/me/apple.png", "init_image_hash": "0" * 64}
    kept, lines = keep_inputs(drawn.path, other, LIMITS.uploads)
    assert kept["init_image"] is kept["strength"] is None
    assert lines == [f"not restored: the start picture apple.png, which is not inside {drawn.path.name}"]
    assert keep_inputs(drawn.path, {}, LIMITS.uploads) == ({}, [])


def test_before_is_as_large_as_the_result(picture, upload_folder):
    drawn = picture(init_image=upload(png_file((20, 90)), "tall.png"), strength=0.4)
    with Image.open(_before(drawn.path, drawn.record, LIMITS.uploads)) as before:
        assert before.size == (64, 48)
    plain = picture()
    assert _before(plain.path, plain.record, LIMITS.uploads) is None

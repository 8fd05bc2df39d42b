"""Pictures that a run starts from: of any kind, and hostile ones."""

import os

import pytest
from PIL import Image

from fastdiff.errors import InputError
from fastdiff.requests import input_picture, png
from fastdiff.requests.input_picture import InputPicture


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_pictures_of_any_mode_keep_it(mode):
    name = "a.png" if mode not in ("CMYK", "F") else "a.tif"
    Image.new("L" if mode == "I;16" else mode, (9, 5)).convert(mode).save(name)
    picture = InputPicture.read(name)
    assert picture.size == (5, 9) and picture.open().size == (9, 5)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_the_upright_pictures(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (9, 5)).save("a.jpg", exif=exif)
    assert InputPicture.read("a.jpg").size == ((9, 5) if orientation > 4 else (5, 9))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "LAB", "I;16", "F"])
def test_black_pictures_are_known_in_any_mode(mode, recwarn):
    black, grey = (Image.new("L", (9, 5), level) for level in (0, 90))
    for image, is_black in ((black, True), (grey, False)):
        if mode == "LAB":
            image = Image.merge("LAB", (image, *[Image.new("L", image.size, 128)] * 2))
        elif mode == "I;16":
            image = image.convert("I").convert("I;16")
        else:
            image = image.point(lambda level: level and 255).convert(mode)
        name = "a.tif" if mode in ("CMYK", "LAB", "F") else "a.png"
        image.save(name, **({"transparency": bytes(256)} if mode == "P" else {}))
        assert (InputPicture.read(name).brightest() == 0) == is_black
    assert not recwarn


def test_a_file_that_changes_is_refused():
    Image.new("RGB", (9, 5)).save("a.png")
    picture = InputPicture.read("a.png")
    Image.new("RGB", (9, 5), "red").save("a.png")
    with pytest.raises(InputError, match=r"init-image 'a.png' has changed since the run began; start again"):
        picture.open()


def test_a_picture_inside_a_png_that_is_gone_is_told(here):
    (here / "a.png").write_bytes(png.encode(Image.new("RGB", (4, 4))))
    with pytest.raises(InputError, match=r"a.png does not hold its picture any more; give the file with --init-image"):
        InputPicture.read("start.png", inside="a.png")


def test_files_that_would_run_programs_or_never_end_are_refused():
    Image.new("RGB", (9, 5)).save("a.eps")
    with pytest.raises(InputError, match=r"'a.eps' is not a picture that PIL reads"):
        InputPicture.read("a.eps")
    os.mkfifo("pipe")
    with pytest.raises(InputError, match="'pipe' is not a file; give a picture"):
        InputPicture.read("pipe")


def test_large_files_are_not_read(monkeypatch):
    monkeypatch.setattr(input_picture, "MAX_BYTES", 2**20)
    with open("a.png", "wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(InputError, match=r"'a.png' has more than 1 MiB; give a smaller picture"):
        InputPicture.read("a.png")


def test_a_header_alone_is_read_if_asked():
    Image.effect_noise((64, 64), 9).save("a.jpg")
    os.truncate("a.jpg", os.stat("a.jpg").st_size // 2)
    assert InputPicture.read("a.jpg", pixels=False).size == (64, 64)
    with pytest.raises(InputError, match=r"'a.jpg': its data cannot be read"):
        InputPicture.read("a.jpg")

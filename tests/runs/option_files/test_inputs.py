"""Image to image in the command: the library's picture, the PNG's settings, and what is refused in one line."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fastdiff import Pipeline
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.requests import completion, png
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, find_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "a cat"
START = ("--init-image", "start.png", "--strength", "0.6", "--steps", "4")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with two pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    levels = np.random.default_rng(1).integers(0, 256, (2, 35, 21, 3), dtype=np.uint8)
    for name, each in zip(("start", "other"), levels, strict=True):
        Image.fromarray(each).save(f"{name}.png")
    return tmp_path


def drawn(folder, image, **options):
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    guidance = png.read_settings("first.png")["guidance_scale"]
    return pipe(PROMPT, image=image, num_inference_steps=4, guidance_scale=guidance, **options).images


def test_the_picture_is_the_librarys_and_the_png_says_it(here, sample, text_folder, pixels):
    assert sample(*START, "-o", "first.png") == 0
    digits = file_hash(here / "start.png")
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    assert (record["init_image"], record["init_image_hash"], record["strength"]) == ("start.png", digits, 0.6)
    assert ", Denoising strength: 0.6, " in text
    (wanted,) = drawn(text_folder("sd1"), Image.open("start.png"), strength=0.6, seed=5)
    assert (wanted.width, wanted.height) == (record["width"], record["height"]) == (20, 34)
    assert wanted.tobytes() == pixels("first.png")

    assert sample("--init-image", "start.png", "--steps", "4", "-o", "default.png") == 0
    assert png.read_settings("default.png")["strength"] == 0.8
    assert sample("-o", "plain.png") == 0
    assert not {"init_image", "init_image_hash", "strength"} & png.read_settings("plain.png").keys()
    assert "Denoising" not in png.read_text("plain.png")["parameters"]


def test_batches_and_sizes_draw_the_librarys_pictures(here, sample, text_folder, pixels):
    more = ("--num-images", "3", "--height", "24", "--width", "16")
    assert sample(*START, *more, "-b", "2", "-o", "two/{seed}.png") == 0
    assert sample(*START, *more, "-b", "1", "-o", "one/{seed}.png") == 0
    shutil.copy("one/5.png", "first.png")
    size = {"height": 24, "width": 16}
    wanted = drawn(text_folder("sd1"), Image.open("start.png"), strength=0.6, seed=[5, 6, 7], **size)
    for seed, picture in zip((5, 6, 7), wanted, strict=True):
        assert pixels(f"one/{seed}.png") == pixels(f"two/{seed}.png") == picture.tobytes()


def test_a_turned_picture_has_its_upright_size(here, sample):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open("start.png").save("turned.jpg", exif=exif)
    assert sample(*START, "--init-image", "turned.jpg", "-o", "first.png") == 0
    record = png.read_settings("first.png")
    assert (record["width"], record["height"]) == (34, 20)


def test_from_finds_the_picture_by_its_hash(here, sample, capsys, pixels):
    assert sample(*START, "-o", "first.png") == 0
    again = ("--from", "first.png", "--steps", "4")
    assert sample(*again, "-o", "again.png", own=()) == 0
    (here / "mine").mkdir()
    shutil.move("start.png", "mine/renamed.png")
    shutil.copy("other.png", "start.png")
    assert sample(*again, "--input-dir", "mine", "-o", "moved.png", own=()) == 0
    assert png.read_settings("moved.png")["init_image"] == "mine/renamed.png"
    assert pixels("first.png") == pixels("again.png") == pixels("moved.png")

    capsys.readouterr()
    assert sample(*again, "-o", "none.png", own=()) == 2
    err = capsys.readouterr().err
    digits = png.read_settings("first.png")["init_image_hash"][:10]
    assert err.count("\n") == 1 and f"first.png was drawn from the picture 'start.png', hash {digits}: it is not" in err
    assert "give the file with --init-image, or its folder with --input-dir" in err
    assert sample(*again, "--init-image", "other.png", "-o", "other-drawn.png", own=()) == 0
    assert png.read_settings("other-drawn.png")["init_image"] == "other.png"
    assert sample(*again, "--input-dir", "nowhere", own=()) == 2


def test_an_embedded_picture_needs_no_file(here, sample, capsys, pixels):
    data = (here / "start.png").read_bytes()
    assert sample(*START, "--embed-inputs", "--grid", "-o", "first.png") == 0
    assert png.read_input("first.png", "init-image") == png.read_input("grid.png", "init-image") == data
    assert png.read_input("start.png", "init-image") is None
    (here / "start.png").unlink()
    again = ("--from", "first.png", "--steps", "4", "--embed-inputs")
    assert sample(*again, "-o", "again.png", own=()) == 0
    assert (here / "again.png").read_bytes() == (here / "first.png").read_bytes()
    assert sample(*again, "-o", "first.png", "--overwrite", own=()) == 0
    assert (here / "again.png").read_bytes() == (here / "first.png").read_bytes()
    capsys.readouterr()
    assert sample("--embed-inputs") == 2
    assert "--embed-inputs: the run starts from no picture; give --init-image" in capsys.readouterr().err


def test_a_large_picture_is_not_embedded(here, sample, monkeypatch, capsys):
    monkeypatch.setattr(png, "MAX_INPUT", 100)
    assert sample(*START, "--embed-inputs", "-o", "first.png") == 2
    assert "--embed-inputs: start.png has more than 0 MiB; leave it out" in capsys.readouterr().err


def test_a_png_cannot_say_which_file_holds_its_picture(here):
    record = {"model": "a", "seed": 1, "prompt": "x", "init_image": "a.png", "init_image_inside": "start.png"}
    assert Request.from_record(record, "p.png").init_image_inside is None


def test_resume_keeps_the_pictures_and_refuses_another_start(here, sample, capsys):
    assert sample(*START, "-o", "out/{seed}.png") == 0
    before = (here / "out/5.png").stat().st_mtime_ns
    assert sample(*START, "--num-images", "2", "--resume", "-o", "out/{seed}.png") == 0
    assert (here / "out/5.png").stat().st_mtime_ns == before and (here / "out/6.png").exists()
    capsys.readouterr()
    for flags in (("--init-image", "other.png"), ("--strength", "0.8")):
        assert sample(*START, *flags, "--height", "34", "--width", "20", "--resume", "-o", "out/{seed}.png") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert (
        "out/5.png was drawn with init_image_hash" in first
        and "out/5.png was drawn with strength 0.6, not 0.8" in second
    )
    plain = ("--steps", "4", "--height", "34", "--width", "20")
    assert sample(*plain, "--resume", "-o", "out/{seed}.png") == 2
    assert "out/5.png was drawn with init_image_hash" in capsys.readouterr().err


def test_another_picture_drops_the_recorded_size(here):
    settings = {"model": "a", "seed": 1, "prompt": "x", "init_image": "a.png", "strength": 0.5, "height": 8, "width": 8}
    source = Recorded("p.png", settings)
    kept = Request.from_flags({"seed": "2"}, source)
    assert (kept.init_image, kept.strength, kept.height) == ("a.png", 0.5, 8)
    other = Request.from_flags({"init_image": "b.png"}, source)
    assert (other.init_image, other.strength, other.height, other.width) == ("b.png", 0.5, None, None)
    label = Request.from_flags({"label": ["1"]}, source)
    assert (label.init_image, label.strength) == (None, None)


def test_a_call_draws_pictures_of_one_strength(here, text_folder):
    from fastdiff.runs.drawing import draw

    steps = {"num_inference_steps": 4, "scheduler": "ddim", "num_images": 5}
    request = Request(model=str(text_folder("sd1")), prompt=(PROMPT,), init_image="start.png", **steps)
    run = Run.prepare(request, find_model(request), COMMAND, batch_size=4)
    strengths = (0.5, 0.5, 0.75, 0.75, 0.75)
    cells = [replace(cell, start=replace(cell.start, strength=x)) for cell, x in zip(run.cells, strengths, strict=True)]
    run = replace(run, cells=[*cells[:4], replace(cells[4], start=None)])
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu", scheduler="ddim")
    done = [progress for progress in draw(run, pipe) if progress.finished]
    assert [len(progress.places) for progress in done] == [2, 2, 1]
    assert [progress.step.num_steps for progress in done] == [2, 3, 4]
    records = [finished.record for progress in done for finished in progress.finished]
    assert [record["strength"] for record in records[:4]] == [0.5, 0.5, 0.75, 0.75]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--init-image", "none.png"), "init-image 'none.png' does not exist; give a picture"),
        (("--init-image", "."), "init-image '.' is not a file; give a picture"),
        (("--init-image", "text.png"), "init-image 'text.png' is not a picture that PIL reads; give a PNG, JPEG"),
        (("--init-image", "cut.png"), "init-image 'cut.png': its data cannot be read ("),
        (
            ("--init-image", "dot.png", "--strength", "1"),
            "init-image 'dot.png': 1 x 1 is too small; give --height and --width",
        ),
        (("--init-image", "wide.png"), "init-image 'wide.png' is 1 x 20000, and each side must be at most 16384"),
        (("--init-image", "bomb.png"), "init-image 'bomb.png' has more than 89478485 pixels; make it smaller"),
        (("--init-image", "start.png", "--strength", "0.1"), "strength 0.1: it leaves none of 1 steps; raise it"),
        (("--init-image", "start.png", "--strength", "2"), "strength: 2.0 is not a number from 0 to 1"),
        (("--strength", "0.5"), "strength 0.5: it says how much of a picture to change; give --init-image"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(here, sample, capsys, flags, message):
    (here / "text.png").write_text("no picture")
    (here / "cut.png").write_bytes((here / "start.png").read_bytes()[:200])
    Image.new("RGB", (1, 1)).save("dot.png")
    Image.new("1", (20000, 1)).save("wide.png")
    if "bomb.png" in flags:
        Image.new("1", (12000, 12000)).save("bomb.png")
    assert sample(*flags, "-o", "first.png") == 2
    err = capsys.readouterr().err
    assert err.startswith("fastdiff: error: ") and err.count("\n") == 1 and message in err
    assert not (here / "first.png").exists()


def test_a_model_of_labels_takes_no_picture(here, sample, capsys):
    for flags in (("--init-image", "start.png"), ("--strength", "0.5")):
        assert sample(*flags, own=("--model", "emoji64", "--label", "0")) == 2
        assert f"{flags[0][2:]}: emoji64 has no text encoder; leave it out" in capsys.readouterr().err


def test_sdxl_changes_less_by_default(text_folder):
    cards = [find_model(Request(model=str(text_folder(kind)))) for kind in ("sd1", "sdxl")]
    picture = object()
    assert [completion.begin(picture, None, 50, card).strength for card in cards] == [0.8, 0.3]

"""Inpainting and larger pictures in the command: what the PNG says, and how --from repeats it."""

import shutil

import numpy as np
import pytest
from PIL import Image

from fastdiff import Pipeline
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.requests import png

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "a cat"
STEPS = ("--steps", "4")
PAINT = ("--init-image", "start.png", "--mask", "mask.png", *STEPS)
LARGER = ("--upscale", "1.5", "--upscale-strength", "0.6", *STEPS)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with a picture and two masks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    levels = np.random.default_rng(1).integers(0, 256, (35, 21, 3), dtype=np.uint8)
    Image.fromarray(levels).save("start.png")
    for name, box in (("mask", (4, 8, 14, 20)), ("other", (0, 0, 7, 9))):
        mask = Image.new("L", (21, 35))
        mask.paste(255, box)
        mask.save(f"{name}.png")
    return tmp_path


def drawn(folder, **options):
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    guidance = png.read_settings("first.png")["guidance_scale"]
    return pipe(PROMPT, num_inference_steps=4, guidance_scale=guidance, seed=5, **options).images[0].tobytes()


def test_a_mask_draws_the_librarys_picture_and_the_png_says_it(here, sample, text_folder, pixels):
    assert sample(*PAINT, "--mask-blur", "4", "-o", "first.png") == 0
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    digits = file_hash(here / "mask.png")
    assert (record["mask"], record["mask_hash"], record["mask_blur"]) == ("mask.png", digits, 4)
    assert (record["strength"], record["width"], record["height"]) == (1, 16, 16)
    assert ", Denoising strength: 1.0, Mask blur: 4.0, " in text and "Inpaint area" not in text
    options = {"image": Image.open("start.png"), "mask_image": Image.open("mask.png"), "mask_blur": 4}
    assert pixels("first.png") == drawn(text_folder("sd1"), **options)
    assert sample(*STEPS, "-o", "plain.png") == 0
    assert not [name for name in png.read_settings("plain.png") if name.startswith(("mask", "upscale", "base"))]
    assert "Mask" not in png.read_text("plain.png")["parameters"]


def test_a_crop_keeps_the_size_of_the_picture(here, sample, text_folder, pixels):
    assert sample(*PAINT, "--mask-crop", "3", "--grid", "-o", "first.png") == 0
    record = png.read_settings("first.png")
    assert (record["width"], record["height"], record["base_width"], record["base_height"]) == (21, 35, 16, 16)
    assert ", Inpaint area: Only masked, Masked area padding: 3, " in png.read_text("first.png")["parameters"]
    options = {"image": Image.open("start.png"), "mask_image": Image.open("mask.png"), "padding_mask_crop": 3}
    assert pixels("first.png") == drawn(text_folder("sd1"), **options)
    for source in ("first.png", "grid.png"):
        assert sample("--from", source, *STEPS, "-o", f"of-{source}", own=()) == 0
        assert pixels(f"of-{source}") == pixels("first.png")


def test_from_finds_the_mask_by_its_hash(here, sample, capsys, pixels):
    assert sample(*PAINT, "-o", "first.png") == 0
    again = ("--from", "first.png", *STEPS)
    (here / "mine").mkdir()
    shutil.move("mask.png", "mine/renamed.png")
    shutil.copy("other.png", "mask.png")
    assert sample(*again, "--input-dir", "mine", "-o", "moved.png", own=()) == 0
    assert png.read_settings("moved.png")["mask"] == "mine/renamed.png"
    assert pixels("moved.png") == pixels("first.png")
    capsys.readouterr()
    assert sample(*again, "-o", "none.png", own=()) == 2
    err = capsys.readouterr().err
    digits = png.read_settings("first.png")["mask_hash"][:10]
    assert err.count("\n") == 1 and f"first.png was drawn with the mask 'mask.png', hash {digits}: it is not" in err
    assert "give the file with --mask, or its folder with --input-dir" in err
    assert sample(*again, "--mask", "other.png", "-o", "other-drawn.png", own=()) == 0
    assert png.read_settings("other-drawn.png")["mask"] == "other.png"
    assert pixels("other-drawn.png") != pixels("first.png")


def test_another_start_picture_drops_the_mask_and_says_so(here, sample, capsys, pixels):
    assert sample(*PAINT, "--mask-blur", "2", "-o", "first.png") == 0
    shutil.copy("start.png", "same.png")
    again = ("--from", "first.png", *STEPS, "--init-image")
    line = "first.png has the mask 'mask.png' for its own start picture; it is left out, unless --mask gives it"
    capsys.readouterr()
    assert sample(*again, "same.png", "-o", "whole.png", own=()) == 0
    assert line in capsys.readouterr().err
    record = png.read_settings("whole.png")
    assert not [name for name in record if name.startswith("mask")] and record["strength"] == 0.8
    assert sample("--init-image", "same.png", *STEPS, "-o", "alone.png") == 0
    assert pixels("whole.png") == pixels("alone.png")
    for flags in ("start.png",), ("same.png", "--mask", "mask.png"):
        capsys.readouterr()
        assert sample(*again, *flags, "-o", f"{len(flags)}.png", own=()) == 0
        assert "left out" not in capsys.readouterr().err
        assert png.read_settings(f"{len(flags)}.png")["mask_blur"] == 2
    assert pixels("1.png") == pixels("first.png") == pixels("3.png")


def test_embedded_files_need_no_others(here, sample, capsys):
    files = {name: (here / name).read_bytes() for name in ("start.png", "mask.png")}
    assert sample(*PAINT, "--embed-inputs", "-o", "first.png") == 0
    assert png.read_input("first.png", "init-image") == files["start.png"]
    assert png.read_input("first.png", "mask") == files["mask.png"]
    for name in files:
        (here / name).unlink()
    assert sample("--from", "first.png", *STEPS, "--embed-inputs", "-o", "again.png", own=()) == 0
    assert (here / "again.png").read_bytes() == (here / "first.png").read_bytes()


def test_a_large_mask_is_not_embedded(here, sample, monkeypatch, capsys):
    monkeypatch.setattr(png, "MAX_INPUT", (here / "start.png").stat().st_size)
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save("mask.png")
    assert sample(*PAINT, "--embed-inputs", "-o", "first.png") == 2
    assert "--embed-inputs: mask.png has more than 0 MiB; leave it out" in capsys.readouterr().err


def test_a_larger_picture_is_the_librarys_and_is_repeated(here, sample, text_folder, pixels):
    assert sample(*LARGER, "--height", "20", "--grid", "-o", "first.png") == 0
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    assert (record["upscale"], record["upscale_strength"], record["upscale_mode"]) == (1.5, 0.6, "pixels")
    assert (record["width"], record["height"], record["base_width"], record["base_height"]) == (24, 30, 16, 20)
    assert ", Size: 16x20, " in text and ", Denoising strength: 0.6, " in text
    assert ", Hires upscale: 1.5, Hires upscaler: Lanczos, " in text
    assert pixels("first.png") == drawn(text_folder("sd1"), height=20, upscale=1.5, upscale_strength=0.6)
    for source in ("first.png", "grid.png"):
        assert sample("--from", source, *STEPS, "-o", f"of-{source}", own=()) == 0
        assert pixels(f"of-{source}") == pixels("first.png")
        assert png.read_settings(f"of-{source}") == png.read_settings("first.png")
    assert sample("--from", "first.png", "--upscale-mode", "latent", *STEPS, "-o", "latent.png", own=()) == 0
    assert pixels("latent.png") != pixels("first.png")
    assert "Hires upscaler: Latent" in png.read_text("latent.png")["parameters"]
    assert sample("--from", "first.png", "--upscale", "1", *STEPS, "-o", "small.png", own=()) == 0
    assert sample("--height", "20", *STEPS, "-o", "plain.png") == 0
    assert (here / "small.png").read_bytes() == (here / "plain.png").read_bytes()


def test_resume_keeps_the_pictures_and_refuses_others(here, sample, capsys):
    assert sample(*PAINT, "-o", "out/{seed}.png") == 0
    before = (here / "out/5.png").stat().st_mtime_ns
    resume = ("--resume", "-o", "out/{seed}.png")
    assert sample(*PAINT, "--num-images", "2", *resume) == 0
    assert (here / "out/5.png").stat().st_mtime_ns == before and (here / "out/6.png").exists()
    assert sample(*LARGER, "--grid", "-o", "large/{seed}.png") == 0
    assert sample(*LARGER, "--grid", "--resume", "-o", "large/{seed}.png") == 0
    capsys.readouterr()
    assert sample(*PAINT, "--mask", "other.png", *resume) == 2
    assert "out/5.png was drawn with mask_hash" in capsys.readouterr().err
    assert sample(*PAINT, "--mask-blur", "1", *resume) == 2
    assert "out/5.png was drawn with mask_blur null, not 1.0" in capsys.readouterr().err
    assert sample(*STEPS, "--resume", "-o", "large/{seed}.png") == 2
    assert "large/5.png was drawn with upscale 1.5, not null, upscale_strength 0.6, not null" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(*PAINT, "--mask-crop", "2"), LARGER])
def test_explain_reports_them(here, sample, capsys, flags):
    assert sample(*flags, "--explain") == 0
    assert "conv2d" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mask", "mask.png"), "mask 'mask.png': it says where to change a picture; give --init-image"),
        (("--init-image", "start.png", "--mask", "none.png"), "mask 'none.png' does not exist; give a picture"),
        (("--init-image", "start.png", "--mask", "text.png"), "mask 'text.png' is not a picture that PIL reads"),
        (
            ("--init-image", "start.png", "--mask", "black.png", "--mask-crop", "1"),
            "mask-crop: 'black.png' is black, so it shows no part; paint white what shall change",
        ),
        (("--init-image", "start.png", "--mask-blur", "nan"), "mask-blur: nan is not a number from 0 to 16384"),
        (("--upscale", "9"), "upscale: 9.0 is not a number from 1 to 8"),
        (("--upscale", "2", "--upscale-mode", "lanczos"), "invalid choice: 'lanczos'; choose from pixels, latent"),
        (("--upscale", "1.5", "--upscale-strength", "0.5"), "upscale-strength 0.5: it leaves none of 1 steps"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(here, sample, capsys, flags, message):
    (here / "text.png").write_text("no picture")
    Image.new("L", (21, 35)).save("black.png")
    assert sample(*flags, "-o", "first.png") == 2
    err = capsys.readouterr().err
    assert err.startswith("fastdiff: error: ") and err.count("\n") == 1 and message in err
    assert not (here / "first.png").exists()

"""Requests with masks and enlarged pictures: the library's pictures in any batch, and settings that repeat them."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from fastdiff import InputError, Pipeline
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.input_picture import InputPicture, Mask
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, draw, find_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "a cat"
STEPS = {"num_inference_steps": 4, "guidance_scale": 3.0}
MASKED = {"init_image": "start.png", "mask": "mask.png"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A current folder with two pictures and two masks, 34 x 20."""
    monkeypatch.chdir(tmp_path)
    levels = np.random.default_rng(1).integers(0, 256, (2, 34, 20, 3), dtype=np.uint8)
    for name, each in zip(("start", "other"), levels, strict=True):
        Image.fromarray(each).save(f"{name}.png")
    for name, box in (("mask", (4, 8, 14, 20)), ("corner", (0, 0, 7, 9))):
        mask = Image.new("L", (20, 34))
        mask.paste(255, box)
        mask.save(f"{name}.png")
    return tmp_path


def prepared(folder, batch_size=None, **options) -> Run:
    request = Request(**{"model": str(folder), "prompt": (PROMPT,), "seed": (5,)} | STEPS | options)
    return Run.prepare(request, find_model(request), COMMAND, batch_size=batch_size)


def finished(run: Run) -> list:
    pipe = Pipeline.from_pretrained(run.request.model, device="cpu")
    return [each for progress in draw(run, pipe) for each in progress.finished]


def drawn(folder, **options):
    seeds = options.pop("seed", 5)
    (found,) = Pipeline.from_pretrained(folder, device="cpu")(PROMPT, seed=seeds, **STEPS, **options).images
    return found


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"strength": 0.5, "mask_blur": 4.0}, {"strength": 0.5, "mask_blur": 4.0}),
        ({"mask_crop": 3}, {"padding_mask_crop": 3}),
        ({"height": 24, "width": 32}, {"height": 24, "width": 32}),
    ],
    ids=["plain", "soft", "crop", "size"],
)
def test_a_mask_paints_the_librarys_picture(text_folder, settings, options):
    run = prepared(text_folder("sd1"), **MASKED, **settings)
    (found,) = finished(run)
    wanted = drawn(text_folder("sd1"), image=Image.open("start.png"), mask_image=Image.open("mask.png"), **options)
    assert found.image.tobytes() == wanted.tobytes() and found.image.size == wanted.size == run.size
    record = found.record
    assert (record["mask"], record["strength"]) == ("mask.png", settings.get("strength", 1.0))
    assert record["mask_hash"] == InputPicture.read("mask.png").sha256
    assert record.get("mask_blur") == settings.get("mask_blur") and record.get("mask_crop") == settings.get("mask_crop")
    again = Request.from_record(record, "a.png")
    (repeated,) = finished(Run.prepare(again, find_model(again), COMMAND))
    assert repeated.image.tobytes() == found.image.tobytes() and repeated.record == record


def test_inpainting_models_read_the_mask(inpainting_folder):
    (found,) = finished(prepared(inpainting_folder, **MASKED))
    wanted = drawn(inpainting_folder, image=Image.open("start.png"), mask_image=Image.open("mask.png"))
    assert found.image.tobytes() == wanted.tobytes()


def test_pictures_and_masks_of_a_batch_are_their_own(text_folder):
    run = prepared(text_folder("sd1"), **MASKED, seed=(5, 6, 7), mask_blur=1.0)
    mask, other = Mask(InputPicture.read("corner.png"), 1.0), InputPicture.read("other.png")
    first, second, third = run.cells
    second = replace(second, start=replace(second.start, mask=mask))
    third = replace(third, start=replace(third.start, picture=other, mask=mask))
    run = replace(run, cells=[first, second, third])
    together = finished(run)
    alone = [finished(replace(run, cells=[cell]))[0] for cell in run.cells]
    assert [each.image.tobytes() for each in together] == [each.image.tobytes() for each in alone]
    assert [each.record["mask"] for each in together] == ["mask.png", "corner.png", "corner.png"]
    assert len({each.image.tobytes() for each in together}) == 3


def test_a_call_draws_masks_of_one_kind(text_folder):
    run = prepared(text_folder("sd1"), **MASKED, seed=(1, 2, 3, 4, 5, 6))
    starts = [replace(cell.start, strength=0.5) for cell in run.cells]
    corner = InputPicture.read("corner.png")
    masks = [Mask(starts[0].mask.picture), Mask(corner), None, Mask(corner, 2.0), Mask(corner, crop=2)]
    masks.append(Mask(InputPicture.read("mask.png"), crop=2))
    both = zip(run.cells, starts, masks, strict=True)
    run = replace(run, cells=[replace(cell, start=replace(start, mask=mask)) for cell, start, mask in both])
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    assert [len(each.places) for each in draw(run, pipe) if each.finished] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("mode", [pytest.param("pixels", marks=pytest.mark.slow), "latent"])
def test_an_enlarged_picture_is_the_librarys_in_any_batch(text_folder, mode):
    settings = {"upscale": 1.5, "upscale_strength": 0.6, "upscale_mode": mode}
    run = prepared(text_folder("sd1"), seed=(5, 6, 7), **settings, height=16, width=20)
    together = finished(run)
    alone = [finished(replace(run, cells=[cell]))[0] for cell in run.cells]
    assert [each.image.tobytes() for each in together] == [each.image.tobytes() for each in alone]
    wanted = drawn(text_folder("sd1"), **settings, height=16, width=20)
    assert together[0].image.tobytes() == wanted.tobytes()
    record = together[0].record
    assert wanted.size == run.size == (record["width"], record["height"]) == (30, 24)
    assert (record["base_width"], record["base_height"]) == (20, 16)
    assert {name: record[name] for name in settings} == settings
    again = Request.from_record(record, "a.png")
    assert (again.height, again.width) == (16, 20)
    (repeated,) = finished(Run.prepare(again, find_model(again), COMMAND))
    assert repeated.image.tobytes() == wanted.tobytes() and repeated.record == record


def test_an_enlarged_picture_may_start_from_one(text_folder):
    (found,) = finished(prepared(text_folder("sd1"), init_image="start.png", upscale=2))
    assert found.image.size == (40, 68)
    assert (found.record["strength"], found.record["upscale_strength"]) == (0.8, 0.5)
    assert found.record["upscale_mode"] == "pixels"


def test_a_factor_of_1_takes_back_a_recorded_one(text_folder):
    run = prepared(text_folder("sd1"), upscale=1.0, upscale_strength=0.6, upscale_mode="latent")
    assert {run.request.upscale, run.request.upscale_strength, run.request.upscale_mode} == {None}
    assert not {"upscale", "base_width"} & run.request.as_record().keys() and run.size == (16, 16)


@pytest.mark.parametrize(("kind", "masked"), [("sd1", 1.0), ("sdxl", 0.9999)])
def test_a_mask_gives_the_default_strength_and_the_models_size(text_folder, kind, masked):
    run = prepared(text_folder(kind), **MASKED, num_inference_steps=50)
    assert run.request.strength == masked and run.size == run.card.size
    plain = prepared(text_folder(kind), init_image="start.png", num_inference_steps=50)
    assert plain.request.strength < 0.9 and plain.size == (20, 34)
    assert prepared(text_folder(kind), **MASKED, mask_blur=0.0).request.mask_blur is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": "mask.png"}, "mask 'mask.png': it says where to change a picture; give --init-image"),
        ({"mask": "none.png", "init_image": "start.png"}, "mask 'none.png' does not exist; give a picture"),
        ({"mask_blur": 2.0}, "mask-blur 2: it is an option of a mask; give --mask, or leave it out"),
        ({"init_image": "start.png", "mask_crop": 0}, "mask-crop 0: it is an option of a mask"),
        (
            {"init_image": "small.png", "mask": "mask.png", "mask_crop": 2},
            "mask-crop: the mask is 34 x 20, and the picture is 8 x 8; give both the same size",
        ),
        ({"upscale_mode": "latent"}, "upscale-mode latent: it says how to enlarge; give --upscale, or leave it out"),
        ({"upscale_strength": 0.0}, "upscale-strength 0.0: it says how to enlarge; give --upscale"),
        ({"upscale": 2, "upscale_strength": 0.2}, "upscale-strength 0.2: it leaves none of 4 steps; raise it"),
        ({"upscale": 2, **MASKED}, "upscale: it enlarges whole pictures, not with a mask; enlarge the result"),
        ({"upscale": 8, "height": 2050}, "upscale 8: it makes a picture of 16400 x 128; a side has at most 16384"),
        ({"upscale": 0.5}, "upscale: 0.5 is not a number from 1 to 8"),
        ({"mask_blur": -1.0, **MASKED}, "mask-blur: -1.0 is not a number from 0 to 16384"),
    ],
)
def test_what_cannot_be_drawn_is_refused(text_folder, settings, message):
    Image.new("RGB", (8, 8)).save("small.png")
    with pytest.raises(InputError) as error:
        prepared(text_folder("sd1"), **settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "given"), [({}, "--init-image and --mask"), ({"init_image": "start.png"}, "--mask")]
)
def test_an_inpainting_model_needs_a_mask(inpainting_folder, settings, given):
    with pytest.raises(InputError, match=rf"^mask: .* is for inpainting; give {given}, a picture that is white where"):
        prepared(inpainting_folder, **settings)


def test_models_of_labels_neither_paint_nor_enlarge():
    for settings in ({"mask": "mask.png"}, {"upscale": 2.0}):
        with pytest.raises(InputError, match=f"{next(iter(settings))}: emoji64 has no text encoder; leave it out"):
            prepared("emoji64", prompt=(), **settings)


def test_a_mask_gives_sdxl_the_guidance_of_diffusers_inpainting(text_folder):
    for options, scale in (({"init_image": "start.png"}, 5.0), (MASKED, 7.5), (MASKED | {"guidance_scale": 2.0}, 2.0)):
        run = prepared(text_folder("sdxl"), **{"guidance_scale": None} | options)
        assert run.request.guidance_scale == scale

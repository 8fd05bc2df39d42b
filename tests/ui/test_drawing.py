"""Pictures that the page draws: complete PNG files with their settings, or none."""

import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff import cli
from fastdiff.diffusion.loop import Loop
from fastdiff.errors import DeviceLostError, InputError, NonFiniteError
from fastdiff.pipelines import Pipeline
from fastdiff.requests import png
from fastdiff.ui import drawing
from fastdiff.ui.drawing import draw, prepare
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.progress import bar

LIMITS = Limits(pictures=4, steps=50, side=128, batch_size=4)


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_the_labels_of_a_group_take_turns(shared, tmp_path):
    run = prepare(UncheckedRequest(label="noto smileys", seed=4, num_images=3, steps=1), shared, LIMITS)
    assert [picture.path.name for _, drawn in draw(run, shared, tmp_path) for picture in drawn] == [
        "noto-other-faces-4.png",
        "noto-hearts-5.png",
        "noto-creatures-6.png",
    ]


def test_pictures_are_the_pipelines_and_hold_their_settings(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "INTERVAL", 0)
    options = UncheckedRequest(label="noto birds", seed=5, num_images=3, steps=2, batch_size=2)
    progress = list(draw(prepare(options, shared, LIMITS), shared, tmp_path))
    assert [(at.places, at.step.index, len(drawn)) for at, drawn in progress] == [
        (range(2), 0, 0),
        (range(2), 1, 2),
        (range(2, 3), 0, 0),
        (range(2, 3), 1, 1),
    ]
    assert [at.fraction for at, _ in progress] == pytest.approx([1 / 3, 2 / 3, 5 / 6, 1])
    pictures = [picture for _, drawn in progress for picture in drawn]
    expected = Pipeline.from_pretrained("emoji64", device="cpu")(
        num_inference_steps=2, num_images=3, seed=5, class_labels="noto birds"
    )
    for seed, picture, image in zip((5, 6, 7), pictures, expected.images, strict=True):
        record = png.read_settings(picture.path)
        assert picture.path.name == f"noto-birds-{seed}.png"
        assert record == {"schema": 1, "numerics": png.NUMERICS, **picture.record}
        assert (record["seed"], record["label"], record["num_inference_steps"]) == (seed, "noto birds", 2)
        assert np.array_equal(pixels(picture.path), np.asarray(image))


def test_between_the_pictures_of_a_fast_run_few_steps_are_told_of(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "INTERVAL", 1000)
    run = prepare(UncheckedRequest(model="./plain/tiny", num_images=3, steps=9, batch_size=2), shared, LIMITS)
    told = [(at.places, at.step.index, len(pictures)) for at, pictures in draw(run, shared, tmp_path)]
    assert told == [(range(2), 0, 0), (range(2), 8, 2), (range(2, 3), 8, 1)]


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_pictures_of_prompts_are_the_commands_byte_for_byte(shared, models_dir, monkeypatch, tmp_path, kind):
    options = UncheckedRequest(
        model=f"./text/{kind}", prompt="the cat", negative_prompt="ocean", clip_skip=1, seed=5, num_images=2, steps=3
    )
    drawn = [each for _, finished in draw(prepare(options, shared, LIMITS), shared, tmp_path) for each in finished]
    assert [each.path.name for each in drawn] == ["the-cat-5.png", "the-cat-6.png"]
    monkeypatch.chdir(models_dir)
    command = ["sample", "-m", f"./text/{kind}", "--prompt", "the cat", "--negative-prompt", "ocean", "-s", "5"]
    command += ["--num-images", "2", "--steps", "3", "--clip-skip", "1", "--device", "cpu"]
    assert cli.main([*command, "-b", "2", "-o", str(tmp_path / "command")]) == 0
    for each in drawn:
        assert each.path.read_bytes() == (tmp_path / "command" / each.path.name).read_bytes()


def test_an_unconditional_model_draws_at_another_size(shared, tmp_path):
    run = prepare(
        UncheckedRequest(model="./plain/tiny", steps=2, width=24, height=32, scheduler="ddim"), shared, LIMITS
    )
    *_, (_, [drawn]) = draw(run, shared, tmp_path)
    assert pixels(drawn.path).shape == (32, 24, 3)
    assert drawn.path.name == "0.png"
    assert drawn.record["label"] is None


def test_stopping_between_steps_keeps_what_is_finished(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "INTERVAL", 0)  # report every step, however fast it is
    steps = draw(prepare(UncheckedRequest(num_images=2, steps=2, batch_size=1), shared, LIMITS), shared, tmp_path)
    for _ in range(3):
        next(steps)
    steps.close()
    assert [path.name for path in tmp_path.iterdir()] == ["fluent-3d-hearts-0.png"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory"), MemoryError, id="GPU"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError, id="CPU"),
        pytest.param(torch.AcceleratorError("CUDA error: unknown"), DeviceLostError, id="a GPU that failed"),
        pytest.param(NonFiniteError("NaN"), NonFiniteError, id="NaN is no black picture"),
    ],
)
def test_failures_while_drawing(shared, monkeypatch, tmp_path, error, expected):
    def fail(*args, **options):
        raise error

    run = prepare(UncheckedRequest(steps=1), shared, LIMITS)
    shared.models.pipeline(run.card, None)
    monkeypatch.setattr(Loop, "step_by_picture", fail)
    with pytest.raises(expected):
        list(draw(run, shared, tmp_path))


def test_the_page_says_that_fewer_are_drawn_at_a_time(shared, monkeypatch, tmp_path):
    step = Loop.step_by_picture

    def step_one(self, x_t, i, noise, part):
        if len(x_t[part]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, x_t, i, noise, part)

    monkeypatch.setattr(Loop, "step_by_picture", step_one)
    run = prepare(UncheckedRequest(num_images=3, steps=1, batch_size=2), shared, LIMITS)
    first, *others = [(bar(at), len(drawn)) for at, drawn in draw(run, shared, tmp_path)]
    assert "out of memory for 2 pictures at a time; continuing with at most 1" in first[0] and first[1] == 2
    assert [("out of memory" in text, count) for text, count in others] == [(False, 1)]


def test_a_full_disk_leaves_no_half_picture(shared, monkeypatch, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastdiff.runs.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        list(draw(prepare(UncheckedRequest(steps=1), shared, LIMITS), shared, tmp_path))
    assert not list(tmp_path.iterdir())


COLOURS = ("red", "lime", "blue")


@pytest.fixture
def pictures(tmp_path):
    """Three pictures on a shelf; the second is smaller."""
    paths = []
    for colour, side in zip(COLOURS, (8, 4, 8), strict=True):
        paths.append(tmp_path / "shelf/2026-01-02/run" / f"{colour}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side), colour).save(paths[-1])
    return paths


def test_a_zip_has_the_files_under_their_names_on_the_shelf(pictures, tmp_path):
    path = drawing.write_zip(tmp_path, tmp_path / "shelf", pictures, 2**20)
    with zipfile.ZipFile(path) as file:
        assert file.namelist() == [f"2026-01-02/run/{colour}.png" for colour in COLOURS]
        assert [file.read(name) for name in file.namelist()] == [each.read_bytes() for each in pictures]


def test_a_zip_has_a_largest_size(pictures, tmp_path):
    with pytest.raises(InputError, match="more than 0 MiB; select fewer"):
        drawing.write_zip(tmp_path, tmp_path / "shelf", pictures, 100)
    assert not (tmp_path / "pictures.zip").exists()


def test_a_grid_has_a_cell_of_the_largest_size_for_each_picture(pictures, tmp_path):
    with Image.open(drawing.write_loose_grid(tmp_path, pictures)) as grid:
        assert grid.size == (2 * 8 + 3 * 2, 2 * 8 + 3 * 2)
        centres = [grid.getpixel(at) for at in ((6, 6), (16, 6), (6, 16), (16, 16))]
        assert centres == [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
        assert grid.getpixel((13, 3)) == (255, 255, 255)  # beside the smaller picture


def test_a_grid_has_a_largest_size(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "MOST_PIXELS", 3 * 64 - 1)
    with pytest.raises(InputError, match="a grid of 3 pictures of this size is too large; select fewer"):
        drawing.write_loose_grid(tmp_path, pictures)


@pytest.mark.parametrize(
    "write", [lambda *args: drawing.write_zip(*args, 2**20), lambda to, _, paths: drawing.write_loose_grid(to, paths)]
)
def test_a_picture_that_is_gone(pictures, tmp_path, write):
    pictures[1].unlink()
    with pytest.raises(InputError, match="a picture was deleted; select the pictures again"):
        write(tmp_path, tmp_path / "shelf", pictures)
    assert not (tmp_path / "pictures.zip").exists()

"""At a guidance scale of 1 no pipeline computes an unconditional half, or encodes a negative prompt."""

import pytest
import torch

from fastdiff import Pipeline
from tests.parity.image_starts.pictures import mask, picture
from tests.support.pairwise import product
from tests.support.text_pipelines import refiner_pipeline

STARTS = {
    "text-to-image": ({}, 4),
    "image-to-image": ({"image": picture(), "strength": 0.5}, 2),
    "inpainting": ({"image": picture(), "mask_image": mask(), "strength": 0.5}, 2),
    "hires": ({"upscale": 2, "upscale_strength": 0.5}, 6),
}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]


@pytest.fixture(scope="module")
def load(text_folder, inpainting_folder, tmp_path_factory):
    def load(kind):
        folder = inpainting_folder if kind == "inpainting-model" else text_folder(kind) if kind != "refiner" else None
        if folder is None:
            folder = tmp_path_factory.mktemp(kind)
            refiner_pipeline().save_pretrained(folder)
        return Pipeline.from_pretrained(folder, device="cpu", scheduler="ddim")

    return load


def rows_of(pipe, monkeypatch, **options):
    """Return the number of pictures that the U-Net predicts in a call, over all steps, and the encoded texts."""
    rows, texts = [], []
    predict, encode = pipe.denoiser.predict, pipe.encoders._encode
    with monkeypatch.context() as patch:
        patch.setattr(pipe.denoiser, "predict", lambda x, *rest: rows.append(len(x)) or predict(x, *rest))
        patch.setattr(pipe.encoders, "_encode", lambda told, *rest: texts.append(told[0]) or encode(told, *rest))
        pipe.encoders.forget()
        pipe("a cat", negative_prompt="dog", num_inference_steps=4, output_type="latent", seed=[1, 2], **options)
    return sum(rows), texts


@pytest.mark.parametrize(("start", "kind"), product(list(STARTS), ["sd1", "sdxl"], together=1))
def test_one_half(load, monkeypatch, start, kind):
    options, steps = STARTS[start]
    _check(load(kind), monkeypatch, options, steps)


@pytest.mark.parametrize("kind", ["inpainting-model", "refiner"])
def test_one_half_of_models_that_need_a_picture(load, monkeypatch, kind):
    options, steps = STARTS["inpainting" if kind == "inpainting-model" else "image-to-image"]
    _check(load(kind), monkeypatch, options, steps)


def _check(pipe, monkeypatch, options, steps):
    pipe.denoiser.use_graphs = False
    for scale in (1.0, 0.5):
        assert rows_of(pipe, monkeypatch, guidance_scale=scale, **options) == (2 * steps, ["a cat"])
    assert rows_of(pipe, monkeypatch, guidance_scale=3.0, **options) == (4 * steps, ["a cat", "dog"])
    outside = {"guidance_scale": 3.0, "guidance_start": 0.5} | options
    total, _ = rows_of(pipe, monkeypatch, **outside)
    assert 2 * steps < total < 4 * steps


def test_an_unguided_picture_does_not_depend_on_the_negative_prompt(load):
    pipe = load("sd1")
    options = {"num_inference_steps": 2, "guidance_scale": 1.0, "seed": 3, "output_type": "pt"}
    first, second = (pipe("a cat", negative_prompt=text, **options).images for text in ("dog", "the ocean"))
    assert torch.equal(first, second)

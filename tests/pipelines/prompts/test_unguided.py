"""At a guidance scale of 1 no pipeline computes an unconditional half, or encodes a negative prompt."""

import diffusers
import pytest
import torch
import transformers

from fastdiff import Pipeline
from tests.parity.image_starts.pictures import mask, picture
from tests.support.text_pipelines import OPEN_CLIP, text_pipeline, tiny_encoder, tiny_unet

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
def load(text_folder, tmp_path_factory):
    def load(kind):
        pipes = {"inpainting-model": _inpainting, "refiner": _refiner}
        if kind not in pipes:
            return Pipeline.from_pretrained(text_folder(kind), device="cpu", scheduler="ddim")
        folder = tmp_path_factory.mktemp(kind)
        pipes[kind]().save_pretrained(folder)
        return Pipeline.from_pretrained(folder, device="cpu", scheduler="ddim")

    return load


def _inpainting():
    return text_pipeline("sd1", unet=tiny_unet("sd1", in_channels=9))


def _refiner():
    projecting = OPEN_CLIP | {"hidden_size": 40, "projection_dim": 24}
    encoder = tiny_encoder(projecting, transformers.CLIPTextModelWithProjection, seed=1)
    unet = tiny_unet("sdxl", cross_attention_dim=40, projection_class_embeddings_input_dim=5 * 8 + 24)
    parts = text_pipeline("sdxl").components
    parts |= {"unet": unet, "text_encoder": None, "tokenizer": None, "text_encoder_2": encoder}
    return diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True, add_watermarker=False)


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


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
@pytest.mark.parametrize("start", STARTS)
def test_one_half(load, monkeypatch, kind, start):
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

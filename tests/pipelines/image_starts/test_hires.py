"""Hires: the picture of image to image from an enlarged picture, in one run, with equal bits in any batch."""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator

from fastdiff import InputError, Pipeline
from tests.parity.image_starts.pictures import picture

STEPS = {"num_inference_steps": 4}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]


@pytest.fixture
def pipe(text_pipes):
    return text_pipes("sd1")[1]


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_pixels_are_image_to_image_from_an_enlarged_picture(kind, text_pipes):
    _, pipe = text_pipes(kind)
    options = STEPS | {"negative_prompt": "dog", "seed": [7, 8]}
    small = pipe("a cat", **options).images
    larger = [each.resize((24, 24), Image.Resampling.LANCZOS) for each in small]
    expected = pipe("a cat", image=larger, strength=0.6, output_type="pt", **options).images
    found = pipe("a cat", upscale=1.5, upscale_strength=0.6, output_type="pt", **options).images
    assert found.shape[2:] == (24, 24) and torch.equal(found, expected)


def test_latents_are_image_to_image_from_enlarged_latents(pipe):
    small = pipe("a cat", seed=7, output_type="latent", **STEPS).images
    larger = F.interpolate(small, (16, 16), mode="bilinear")
    expected = pipe("a cat", image=larger, strength=0.75, seed=7, output_type="pt", **STEPS).images
    options = {"upscale": 2, "upscale_mode": "latent", "upscale_strength": 0.75}
    assert torch.equal(pipe("a cat", seed=7, output_type="pt", **options, **STEPS).images, expected)


def test_the_steps_of_both_parts_are_one_run(pipe):
    steps = list(pipe.stream("a cat", upscale=2.0, **STEPS))  # PNDM calls the model once more
    assert [(step.index, step.num_steps) for step in steps] == [(i, 8) for i in range(8)]
    assert [step.images is None for step in steps] == [True] * 7 + [False]
    assert [step.x_t.shape[1] for step in steps] == [8] * 5 + [16] * 3
    (image,) = steps[-1].images
    assert image.size == (32, 32)


def test_sizes_are_rounded_to_what_the_model_draws(pipe):
    (image,) = pipe("a cat", height=20, width=24, upscale=1.3, **STEPS).images
    assert image.size == (32, 26)  # 31.2 and 26, to multiples of 2


def test_a_picture_is_drawn_anew_and_then_larger(pipe):
    found = pipe("a cat", image=picture(), strength=0.5, upscale=2, seed=3, output_type="pt", **STEPS).images
    (small,) = pipe("a cat", image=picture(), strength=0.5, seed=3, **STEPS).images
    larger = small.resize((40, 32), Image.Resampling.LANCZOS)
    assert torch.equal(found, pipe("a cat", image=larger, strength=0.5, seed=3, output_type="pt", **STEPS).images)


def test_same_bits_in_any_company(pipe):
    options = STEPS | {"upscale": 1.5, "output_type": "pt"}
    alone = pipe("a cat", seed=7, **options).images[0]
    for place, seeds in enumerate([[7, 1], [1, 7, 2]]):
        batch = pipe("a cat", seed=seeds, **options).images
        assert torch.equal(batch[place], alone) and not torch.equal(batch[place - 1], alone)


def test_a_generator_goes_on(pipe):
    def draw(**options):
        return pipe("a cat", generator=Generator().manual_seed(3), output_type="pt", **options, **STEPS).images

    assert torch.equal(draw(upscale=1.5), draw(upscale=1.5))
    generator = Generator().manual_seed(3)
    (small,) = pipe("a cat", generator=generator, **STEPS).images
    larger = small.resize((24, 24), Image.Resampling.LANCZOS)
    expected = pipe("a cat", image=larger, strength=0.5, generator=generator, output_type="pt", **STEPS).images
    assert torch.equal(draw(upscale=1.5), expected)


def test_the_vae_works_in_tiles_above_1536_pixels_and_not_afterwards(text_folder, monkeypatch):
    from fastdiff.pipelines import hires

    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    monkeypatch.setattr(hires, "LARGEST_WHOLE", 24)
    whole = pipe("a cat", upscale=1.5, output_type="pt", **STEPS).images
    seen = [pipe.vae.use_tiling for _ in pipe.stream("a cat", upscale=2, **STEPS)]
    assert seen == [False] * 5 + [True] * 3 and pipe.vae.use_tiling is False
    assert torch.equal(pipe("a cat", upscale=1.5, output_type="pt", **STEPS).images, whole)


WRONG = {
    "less": ({"upscale": 1.0}, "upscale: 1.0 is not a number greater than 1"),
    "much": ({"upscale": 9}, "upscale: 9 is not a number greater than 1 and at most 8"),
    "strength": ({"upscale": 2, "upscale_strength": 2}, "upscale_strength: 2 is not a number from 0 to 1"),
    "no-step": ({"upscale": 2, "upscale_strength": 0.1}, "strength: 0.1 of 4 steps leaves none"),
    "mode": ({"upscale": 2, "upscale_mode": "ai"}, "upscale_mode: 'ai' is not one of pixels, latent"),
    "alone": ({"upscale_mode": "latent"}, "upscale_mode: it says how upscale enlarges; give upscale"),
    "mask": ({"upscale": 2, "image": picture(), "mask_image": picture()}, "upscale: .* leave out mask_image"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_one_line(pipe, case):
    options, message = WRONG[case]
    with pytest.raises(InputError, match=f"^{message}"):
        pipe.stream("a cat", **options, **STEPS)


def test_only_sdxl_has_parts(text_pipes):
    _, pipe = text_pipes("sdxl")
    with pytest.raises(InputError, match=r"^upscale: .* leave out denoising_end"):
        pipe.stream("a cat", upscale=2, denoising_end=0.5, **STEPS)

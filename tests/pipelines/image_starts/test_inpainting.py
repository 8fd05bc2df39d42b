"""Inpainting: equal bits in any batch, what is kept, and errors of one line."""

import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff import InputError, Pipeline
from fastdiff.pipelines import masks
from tests.parity.image_starts.pictures import as_array, mask, picture
from tests.support.pairwise import product
from tests.support.text_pipelines import text_pipeline, tiny_unet

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("cuda", "float32", marks=GPU),
        pytest.param("cuda", "bfloat16", marks=GPU),
    ],
    ids=["cpu", "cuda-fp32", "cuda-bf16"],
)
STEPS = {"num_inference_steps": 3, "output_type": "pt"}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]


@pytest.fixture(scope="module")
def folder_with_channels(tmp_path_factory):
    """Return the folder of a pipeline whose U-Net reads the mask."""
    folder = tmp_path_factory.mktemp("inpainting")
    text_pipeline("sd1", unet=tiny_unet("sd1", in_channels=9)).save_pretrained(folder)
    return folder


@pytest.fixture
def pipe(text_pipes):
    return text_pipes("sd1")[1]


@pytest.fixture(scope="module")
def with_channels(folder_with_channels):
    return Pipeline.from_pretrained(folder_with_channels, device="cpu")


@ON
@pytest.mark.parametrize(
    ("case", "strength"), product(["sd1 euler-a", "sdxl heun", "channels euler-a"], [0.7, 1.0], together=1)
)
def test_same_bits_in_any_company(text_folder, folder_with_channels, case, strength, device, dtype):
    """The bits are the same alone and in batches, at any place, beside other pictures and masks."""
    kind, scheduler = case.split()
    folder = folder_with_channels if kind == "channels" else text_folder(kind)
    pipe = Pipeline.from_pretrained(folder, device=device, dtype=dtype, scheduler=scheduler)
    options = STEPS | {"strength": strength}
    alone = pipe("a cat", image=picture(7), mask_image=mask(7), seed=7, **options).images[0]
    assert alone.isfinite().all() and alone.std() > 0
    for place, seeds in enumerate([[7, 1, 2], [1, 7, 2, 3, 4], [1, 2, 7]]):
        given = {"image": [picture(seed) for seed in seeds], "mask_image": [mask(seed) for seed in seeds]}
        batch = pipe("a cat", seed=seeds, **given, **options).images
        assert torch.equal(batch[place], alone)
        assert not torch.equal(batch[place - 1], alone)


def test_a_black_mask_keeps_the_latents(pipe):
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    given = {"image": latents, "output_type": "latent", "num_inference_steps": 2}
    drawn = pipe("a cat", mask_image=torch.zeros(16, 16), **given).images
    assert torch.equal(drawn, latents)
    half = torch.zeros(16, 16)
    half[:, 8:] = 1
    drawn = pipe("a cat", mask_image=half, **given).images
    assert torch.equal(drawn[..., :4], latents[..., :4]) and not torch.equal(drawn[..., 4:], latents[..., 4:])


def test_masks_are_counted_as_pictures_are(pipe):
    several = [mask(i) for i in range(3)]
    drawn = pipe("a cat", image=picture(), mask_image=several, **STEPS).images
    assert len(drawn) == 3
    alone = pipe("a cat", image=picture(), mask_image=several[2], seed=2, **STEPS).images[0]
    assert torch.equal(drawn[2], alone)
    mixed = {"image": [picture(0), picture(1)], "mask_image": several}
    assert len(pipe("a cat", batch_size=6, **mixed, **STEPS).images) == 6


def test_the_size_is_the_models(pipe):
    given = {"image": picture(width=23, height=17), "mask_image": mask(width=9, height=11)}
    assert pipe("a cat", **given, **STEPS).images.shape == (1, 3, 16, 16)
    assert pipe("a cat", height=24, **given, **STEPS).images.shape == (1, 3, 24, 16)


def test_an_inpainting_model_is_saved_as_one(with_channels, tmp_path):
    assert with_channels.diffusers_class == "StableDiffusionPipeline"  # the folder's own
    given = {"image": picture(), "mask_image": mask()}
    drawn = with_channels("a cat", **given, **STEPS).images
    own = with_channels.with_parts(vae=with_channels.vae)
    own._card = None
    assert own.diffusers_class == "StableDiffusionInpaintPipeline"
    own.save_pretrained(tmp_path)
    again = Pipeline.from_pretrained(tmp_path, device="cpu")
    assert torch.equal(again("a cat", picture(), mask(), **STEPS).images, drawn)


def test_bytes_and_bools_are_masks(pipe):
    grey = mask()
    expected = pipe("a cat", image=picture(), mask_image=as_array(grey), **STEPS).images
    for other in (np.asarray(grey), np.asarray(grey) >= 128, torch.from_numpy(np.array(grey)), [as_array(grey)]):
        assert torch.equal(pipe("a cat", image=picture(), mask_image=other, **STEPS).images, expected)


@pytest.mark.parametrize("size", [(16, 16), (40, 16), (16, 40)])
def test_filled_pictures_are_not_stretched(size):
    found = masks.filled(picture(), *size)
    assert found.size == size


WHITE = Image.new("L", (20, 16), 255)
USUAL = {"image": picture(), "mask_image": WHITE}
CROP = USUAL | {"padding_mask_crop": 2}
BAD = {
    "no-image": ({"mask_image": WHITE}, "mask_image: it says where to change image; give image too"),
    "blur-alone": ({"mask_blur": 2}, "mask_blur: only a call with mask_image takes it"),
    "crop-alone": ({"padding_mask_crop": 2}, "padding_mask_crop: only a call with mask_image takes it"),
    "latents-alone": ({"masked_image_latents": torch.zeros(1, 4, 8, 8)}, "masked_image_latents: only a call with"),
    "blur": (USUAL | {"mask_blur": -1}, "mask_blur: -1 is not a number from 0 to 16384"),
    "crop": (CROP | {"padding_mask_crop": -1}, "padding_mask_crop: -1 is not a whole number"),
    "path": (USUAL | {"mask_image": "m.png"}, "mask_image: 'm.png' holds no masks; give PIL images"),
    "nothing": (USUAL | {"mask_image": []}, r"mask_image: \[\] holds no masks"),
    "channels": (USUAL | {"mask_image": torch.zeros(1, 3, 8, 8)}, "mask_image: .* holds no masks"),
    "sizes": (USUAL | {"mask_image": [torch.zeros(8, 8), torch.zeros(8, 9)]}, "mask_image: .* of one size"),
    "nan": (USUAL | {"mask_image": torch.full((8, 8), float("nan"))}, "mask_image: it has NaN or infinite values"),
    "count": (
        USUAL | {"mask_image": [WHITE] * 2, "num_images_per_prompt": 3},
        "mask_image: 2 given for 3 pictures; give one, or one for each picture",
    ),
    "no-step": (USUAL | {"strength": 0.1, "num_inference_steps": 5}, "strength: 0.1 of 5 steps leaves none"),
    "size": (USUAL | {"height": 17}, "height 17, width 16: both must be multiples of 2"),
    "crop-of-arrays": (CROP | {"image": as_array(picture())}, "padding_mask_crop: it crops one PIL image by one PIL m"),
    "crop-of-two": (CROP | {"image": [picture()] * 2}, "padding_mask_crop: it crops one PIL image by one PIL mask"),
    "crop-of-black": (CROP | {"mask_image": Image.new("L", (20, 16))}, "mask_image: it is black, so there is nothing"),
    "crop-sizes": (
        CROP | {"mask_image": Image.new("L", (20, 17), 255)},
        "padding_mask_crop: image is 16 x 20 and mask_image 17 x 20; give both the same size",
    ),
    "crop-output": (CROP | {"output_type": "pt"}, "padding_mask_crop: it returns PIL images; give output_type pil"),
    "masked-latents": (
        USUAL | {"masked_image_latents": torch.zeros(1, 4, 8, 9)},
        r"masked_image_latents: expected \(N, 4, 8, 8\), got \(1, 4, 8, 9\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_drawn_is_one_line(case, pipe):
    options, line = BAD[case]
    with pytest.raises(InputError, match=f"^{line}") as error:
        pipe.stream(**{"prompt": "a cat"} | options)
    assert "\n" not in str(error.value)


def test_an_inpainting_model_needs_a_mask(with_channels):
    for options, line in [
        ({}, "mask_image: this model is for inpainting; give image and mask_image"),
        ({"image": picture()}, "mask_image: this model is for inpainting"),
        (USUAL | {"image": torch.zeros(1, 4, 8, 8)}, "image: this model reads the masked picture; give a picture, or"),
    ]:
        with pytest.raises(InputError, match=f"^{line}"):
            with_channels.stream("a cat", **options)

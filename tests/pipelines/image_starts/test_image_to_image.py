"""Image to image: equal bits in any batch, the number and the size of the pictures, and errors of one line."""

import numpy as np
import pytest
import torch
from torch import Generator

from fastdiff import AutoencoderTiny, InputError, Pipeline
from tests.parity.image_starts.pictures import as_array, as_tensor, picture

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("cuda", "float32", marks=GPU),
        pytest.param("cuda", "bfloat16", marks=GPU),
        pytest.param("cuda", "float16", marks=GPU),
    ],
    ids=["cpu", "cuda-fp32", "cuda-bf16", "cuda-fp16"],
)
STEPS = {"num_inference_steps": 4, "output_type": "pt", "strength": 0.6}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]


@pytest.fixture
def pipe(text_pipes):
    return text_pipes("sd1")[1]


@pytest.fixture(scope="module")
def unchanged(text_pipes):
    """Return a pipeline and its picture, for calls that are refused: each leaves it as it was."""
    pipe = text_pipes("sd1")[1]
    return pipe, drawn(pipe)


def drawn(pipe):
    return pipe("a cat", seed=3, num_inference_steps=2, output_type="latent").images


@ON
@pytest.mark.parametrize(("kind", "scheduler"), [("sd1", None), ("sd1", "heun"), ("sdxl", "euler-a")])
def test_same_bits_in_any_company(text_folder, kind, scheduler, device, dtype):
    """The bits are the same alone and in batches, at any place, beside other pictures."""
    pipe = Pipeline.from_pretrained(text_folder(kind), device=device, dtype=dtype, scheduler=scheduler)
    alone = pipe("a cat", image=picture(7), seed=7, **STEPS).images[0]
    assert alone.isfinite().all() and alone.std() > 0
    for place, seeds in enumerate([[7, 1, 2], [1, 7, 2, 3, 4], [1, 2, 7]]):
        batch = pipe("a cat", image=[picture(seed) for seed in seeds], seed=seeds, **STEPS).images
        assert torch.equal(batch[place], alone)
        assert not torch.equal(batch[place - 1], alone)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_a_seed_is_a_generator_of_each_picture(kind, text_pipes):
    _, pipe = text_pipes(kind)
    drawn = pipe("a cat", image=picture(), seed=[3, 9], **STEPS).images
    generators = [Generator().manual_seed(3), Generator().manual_seed(9)]
    assert torch.equal(
        pipe("a cat", image=picture(), generator=generators, num_images_per_prompt=2, **STEPS).images, drawn
    )


def test_a_call_without_a_picture_draws_the_same_afterwards(pipe):
    before = pipe("a cat", **STEPS | {"strength": None}).images
    pipe("a cat", image=picture(), **STEPS)
    assert torch.equal(pipe("a cat", **STEPS | {"strength": None}).images, before)


def test_pictures_are_drawn_one_each_unless_more_are_asked_for(pipe):
    several = [picture(i) for i in range(3)]
    drawn = pipe("a cat", image=several, **STEPS).images
    assert len(drawn) == 3
    assert torch.equal(pipe("a cat", image=several[2], seed=2, **STEPS).images[0], drawn[2])
    assert len(pipe("a cat", image=several, batch_size=6, **STEPS).images) == 6
    assert len(pipe(["a cat", "riding"], image=several[:2], **STEPS).images) == 2
    repeated = pipe("a cat", image=several[:2], seed=[5, 6, 5, 6], **STEPS).images
    assert torch.equal(repeated[0], repeated[2]) and torch.equal(repeated[1], repeated[3])
    assert torch.equal(pipe("a cat", image=several[1], seed=6, **STEPS).images[0], repeated[1])


@pytest.mark.parametrize(("strength", "steps"), [(0.3, 3), (0.29, 2), (1, 10), (0.95, 9)])
def test_the_steps_of_a_strength(strength, steps, pipe):
    pipe = pipe.with_scheduler(Pipeline.from_pretrained("emoji-sd", device="cpu").scheduler)
    drawn = [*pipe.stream("a cat", image=picture(), num_inference_steps=10, strength=strength)]
    assert [step.num_steps for step in drawn] == [steps] * steps
    assert pipe.num_timesteps == steps


def test_the_size_is_the_pictures(pipe):
    assert pipe("a cat", image=picture(width=23, height=17), **STEPS).images.shape == (1, 3, 16, 22)
    assert pipe("a cat", image=picture(), height=24, width=12, **STEPS).images.shape == (1, 3, 24, 12)
    latents = torch.zeros(4, 5, 9)
    assert pipe("a cat", image=latents, **STEPS).images.shape == (1, 3, 10, 18)


def test_one_picture_in_any_form_is_one_drawing(pipe):
    image = picture()
    drawn = pipe("a cat", image=image, **STEPS).images
    signed = 2 * as_tensor(image) - 1
    for other in (
        [image],
        as_array(image),
        np.asarray(image),
        as_array(image)[:, ::-1][:, ::-1],
        as_tensor(image)[None],
        [as_tensor(image)],
        signed,
    ):
        torch.testing.assert_close(pipe("a cat", image=other, **STEPS).images, drawn, rtol=0, atol=1e-5)
    grey = as_tensor(image.convert("L").convert("RGB"))
    expected = pipe("a cat", image=grey, **STEPS).images
    torch.testing.assert_close(pipe("a cat", image=image.convert("L"), **STEPS).images, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(pipe("a cat", image=grey[:1], **STEPS).images, expected, rtol=0, atol=1e-5)


def test_the_latents_of_a_run_are_a_picture_to_start_from(pipe):
    """An SDEdit of strength 0.05 in 20 steps changes little, so latents are not scaled twice."""
    latents = pipe("a cat", num_inference_steps=4, output_type="latent").images
    again = pipe("a cat", image=latents, strength=0.05, num_inference_steps=20, output_type="latent").images
    assert (again - latents).abs().mean() < 0.3 * latents.abs().mean()


def test_a_tiny_vae_starts_from_its_latents(pipe):
    one = (1,) * 2
    vae = AutoencoderTiny(
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=one,
        num_decoder_blocks=one,
    )  # fmt: skip
    pipe = pipe.with_parts(vae=vae)
    assert pipe("a cat", image=picture(), **STEPS).images.shape[1] == 3


NAN = float("nan")
BAD = {
    "no-image": ({"strength": 0.5}, "strength: it says how much of image to change; give image, or leave it out"),
    "strength": ({"image": picture(), "strength": 1.5}, "strength: 1.5 is not a number from 0 to 1"),
    "strength-text": ({"image": picture(), "strength": "a"}, "strength: 'a' is not a number from 0 to 1"),
    "no-step": (
        {"image": picture(), "strength": 0.1, "num_inference_steps": 5},
        "strength: 0.1 of 5 steps leaves none; raise it, or take more steps",
    ),
    "no-strength": ({"image": picture(), "strength": 0}, "strength: 0 of 50 steps leaves none"),
    "path": ({"image": "cat.png"}, "image: 'cat.png' holds no pictures; give PIL images"),
    "nothing": ({"image": []}, r"image: \[\] holds no pictures; give PIL images"),
    "mixed": ({"image": [picture(), as_array(picture())]}, "image: .* holds no pictures; give PIL images"),
    "sizes": ({"image": [as_array(picture()), as_array(picture(width=8))]}, "image: .* of one size"),
    "small": ({"image": picture(width=1, height=1)}, "image: 1 x 1 is too small; each side must be at least 2"),
    "wide": ({"image": picture(width=20_000, height=2)}, "image: it is 2 x 20000, and each side must be at most 16384"),
    "objects": ({"image": np.empty((8, 8, 3), object)}, "image: .* holds no pictures"),
    "complex": ({"image": torch.zeros(3, 8, 8, dtype=torch.complex64)}, "image: .* holds no pictures"),
    "nan": ({"image": torch.full((3, 16, 16), NAN)}, "image: it has NaN or infinite values; give finite ones"),
    "five-channels": ({"image": torch.zeros(5, 16, 16)}, "image: it has 5 channels, and this model's VAE takes 3"),
    "transparent-array": ({"image": np.zeros((16, 16, 4))}, "image: it has 4 channels, and this model's VAE takes 3"),
    "count": (
        {"image": [picture()] * 2, "num_images_per_prompt": 3},
        "image: 2 given for 3 pictures; give one, or one for each picture",
    ),
    "count-of-prompts": ({"prompt": ["a", "b"], "image": [picture()] * 3}, "prompt: 2 given for 3 pictures"),
    "latents": (
        {"image": picture(), "latents": torch.zeros(1, 4, 8, 8)},
        "latents: a run with image starts from it; leave out one of the two",
    ),
    "height": ({"image": picture(), "height": 0}, "height: 0 is not a whole number"),
    "num-images": ({"image": picture(), "num_images_per_prompt": "a"}, "num_images_per_prompt: 'a' is not"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_drawn_is_one_line(case, unchanged):
    (options, line), (pipe, before) = BAD[case], unchanged
    with pytest.raises(InputError, match=f"^{line}") as error:
        pipe.stream(**{"prompt": "a cat"} | options)
    assert "\n" not in str(error.value)
    assert torch.equal(drawn(pipe), before)

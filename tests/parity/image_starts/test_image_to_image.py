"""Image to image against diffusers' pipelines in float32: one generator, the latents of every step, the pictures."""

import diffusers
import pytest
import torch

from fastdiff.sampler_names import SCHEDULER_OPTIONS, SCHEDULERS
from tests.parity.image_starts.pictures import IMAGE_TO_IMAGE, as_array, as_tensor, of_same_parts, picture
from tests.support.text_parity import assert_both_draw_the_same, assert_same, draw
from tests.support.text_pipelines import tiny_vae

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword",
        "ignore:__array_wrap__ must accept context",
        "ignore:.*algorithm_type.* is deprecated:FutureWarning",
        "ignore:Passing `image` as torch tensor with value range:FutureWarning",
        "ignore:You have passed .* text prompts:FutureWarning",
        "ignore:Passing `image` as a list of 4d:FutureWarning",
    ),
]
STEPS = 6
SEVERAL = {"prompt": ["a cat", "riding"], "num_images_per_prompt": 2}


@pytest.fixture(scope="module")
def both(text_pipes):
    """Return diffusers' image-to-image pipeline of a kind and ours."""

    def both(kind):
        theirs, ours = text_pipes(kind)
        return of_same_parts(IMAGE_TO_IMAGE, kind, theirs), ours

    return both


CASES = {
    "default-strength": {},
    "weak": {"strength": 0.3},
    "middle": {"strength": 0.6},
    "full": {"strength": 1.0},
    "rounded-down": {"strength": 0.59},
    "unguided": {"strength": 0.6, "guidance_scale": 1.0},
    "latent": {"strength": 0.6, "output_type": "latent"},
    "batch-of-one-picture": SEVERAL,
    "batch-of-pictures": SEVERAL | {"image": [picture(0), picture(1)]},
    "picture-for-each": SEVERAL | {"image": [picture(i) for i in range(4)]},
    "generators": SEVERAL | {"image": [picture(0), picture(1)], "seed": [3, 4, 5, 6]},
    "odd-size": {"image": picture(width=23, height=17)},
    "array": {"image": as_array(picture())},
    "array-of-odd-size": {"image": as_array(picture(width=23, height=17))},
    "arrays": SEVERAL | {"image": [as_array(picture(0)), as_array(picture(1))]},
    "tensor": {"image": as_tensor(picture())},
    "signed-tensor": {"image": 2 * as_tensor(picture())[None] - 1},
    "tensor-of-odd-size": {"image": as_tensor(picture(width=23, height=17))},
    "latents": {"image": torch.randn(1, 4, 8, 6, generator=torch.Generator().manual_seed(8))},
    "several-latents": SEVERAL | {"image": torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(8))},
}
SIZES = {
    "sizes": {"original_size": (500, 300), "target_size": (64, 8), "crops_coords_top_left": (3, 40)},
    "half-of-the-negative-sizes": {"negative_original_size": (30, 50), "crops_coords_top_left": (3, 40)},
    "negative-sizes": {
        "negative_original_size": (30, 50),
        "negative_target_size": (8, 9),
        "negative_crops_coords_top_left": (7, 0),
    },
}
KINDS = ("sd1", "sdxl", "sd2")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, id=f"{kind}-{case}", marks=[] if kind == KINDS[i % 2] else pytest.mark.slow)
        for i, (case, options) in enumerate(CASES.items())
        for kind in KINDS
    ],
)
def test_options(kind, options, both):
    assert_both_draw_the_same(*both(kind), **{"image": picture(), "num_inference_steps": STEPS} | options)


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
def test_sizes_of_sdxl(options, both):
    assert_both_draw_the_same(*both("sdxl"), image=picture(), strength=0.4, num_inference_steps=5, **options)


def test_mean_and_deviation_of_sdxl_latents(text_pipes):
    theirs, ours = text_pipes("sdxl")
    vae = tiny_vae("sdxl", latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0])
    theirs, ours = of_same_parts(IMAGE_TO_IMAGE, "sdxl", theirs, vae=vae), ours.with_parts(vae=vae)
    assert_both_draw_the_same(theirs, ours, image=picture(), strength=0.6, num_inference_steps=STEPS)


def test_the_picture_counts_even_at_full_strength(both):
    """The comparison above can fail."""
    _, ours = both("sd1")
    one, other = (draw(ours, image=picture(i), strength=1.0) for i in (0, 1))
    with pytest.raises(AssertionError):
        assert_same(one, other)


NAMES = [name for name in SCHEDULERS if SCHEDULERS[name] != "FlowMatchEulerDiscreteScheduler"]
FIRST = [*{SCHEDULERS[name]: name for name in reversed(NAMES)}.values()]  # the first name of each class
QUICK = FIRST[1::2]  # the others are quick in test_inpainting.py


@pytest.mark.parametrize(
    "strength", [pytest.param(0.3, marks=pytest.mark.slow), 0.6, pytest.param(1.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_schedulers(name, strength, text_pipes):
    theirs, ours = text_pipes("sd1")
    scheduler = getattr(diffusers, SCHEDULERS[name]).from_config(
        {**theirs.scheduler.config, "clip_sample": False}, **SCHEDULER_OPTIONS.get(name, {})
    )
    theirs = of_same_parts(IMAGE_TO_IMAGE, "sd1", theirs, scheduler=scheduler)
    ours = ours.with_scheduler(scheduler)
    options = {"image": picture(), "strength": strength, "num_inference_steps": 10}
    (found, our_pictures), (wanted, their_pictures) = draw(ours, **options), draw(theirs, **options)
    found, wanted = (
        [(round(timestep, 3), x) for timestep, x in each] for each in (found, wanted)
    )  # dpm2's are between
    assert_same((found, our_pictures), (wanted, their_pictures))

"""Inpainting against diffusers' pipelines in float32: one generator, the latents of every step, and the pictures."""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from fastdiff.sampler_names import SCHEDULER_OPTIONS, SCHEDULERS
from tests.parity.image_starts.pictures import (
    INPAINTING,
    PLAIN,
    WITH_CHANNELS,
    as_array,
    as_tensor,
    mask,
    of_same_parts,
    picture,
)
from tests.support.pairwise import product
from tests.support.text_parity import assert_both_draw_the_same, assert_same, draw

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword",
        "ignore:__array_wrap__ must accept context",
        "ignore:.*algorithm_type.* is deprecated:FutureWarning",
        "ignore:The configuration file of the unet has set the default `sample_size`:FutureWarning",
        "ignore:.*skip_prk_steps:FutureWarning",
    ),
]
STEPS = 6
WIDE = {"height": 16, "width": 24}
SEVERAL = {"prompt": ["a cat", "riding"], "num_images_per_prompt": 2}
KINDS = ("sd1", "sdxl", "sd2")


CASES = {
    "default-strength": {},
    "weak": {"strength": 0.3},
    "middle": {"strength": 0.6},
    "full": {"strength": 1.0},
    "almost-full": {"strength": 0.9999},
    "unguided": {"strength": 0.6, "guidance_scale": 1.0},
    "latent": {"output_type": "latent"},
    "wide": WIDE | {"strength": 0.6},
    "black": {"mask_image": Image.new("L", (20, 16), 0)},
    "white": {"mask_image": Image.new("L", (20, 16), 255), "guidance_scale": 1.0},
    "colours": {"mask_image": picture(5)},
    "one-bit": {"mask_image": mask(width=64, height=48).convert("1")},
    "palette": {"mask_image": mask(width=64, height=48).convert("P")},
    "mask-array": {"mask_image": as_array(mask())},
    "mask-arrays": SEVERAL | {"mask_image": np.stack([as_array(mask(i)) for i in range(2)])},
    "mask-array-with-channel": {"mask_image": as_array(mask())[..., None]},
    "mask-tensor": {"mask_image": torch.from_numpy(as_array(mask()))},
    "mask-tensors": SEVERAL | {"mask_image": torch.stack([torch.from_numpy(as_array(mask(i))) for i in range(2)])},
    "mask-tensor-with-channel": {"mask_image": torch.from_numpy(as_array(mask()))[None, None]},
    "batch-of-one-picture": SEVERAL,
    "batch-of-pictures": SEVERAL | {"image": [picture(0), picture(1)], "mask_image": [mask(0), mask(1)]},
    "picture-for-each": SEVERAL
    | {"image": [picture(i) for i in range(4)], "mask_image": [mask(i) for i in range(4)], "strength": 0.7},
    "masks-of-one-picture": SEVERAL | {"mask_image": [mask(0), mask(1)], "strength": 0.7},
    "pictures-of-one-mask": SEVERAL | {"image": [picture(0), picture(1)], "strength": 0.7},
    "generators": SEVERAL
    | {"image": [picture(0), picture(1)], "mask_image": [mask(0), mask(1)], "seed": [3, 4, 5, 6], "strength": 0.6},
    "array": {"image": as_array(picture()), "strength": 0.6},
    "tensor": {"image": as_tensor(picture()), "strength": 0.6},
    "noise": {"latents": torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(8)), "strength": 0.6},
    "masked-latents": {
        "masked_image_latents": torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(8)),
        "strength": 0.6,
    },
}


@pytest.mark.parametrize(
    ("kind", "channels", "options"),
    [
        pytest.param(
            kind,
            channels,
            options,
            id=f"{kind}-{channels}-{case}",
            marks=[] if (kind, channels) == (KINDS[i % 2], (PLAIN, WITH_CHANNELS)[i // 2 % 2]) else pytest.mark.slow,
        )
        for i, (case, options) in enumerate(CASES.items())
        for kind in KINDS
        for channels in (PLAIN, WITH_CHANNELS)
    ],
)
def test_options(kind, channels, options, both):
    usual = {"image": picture(), "mask_image": mask(), "num_inference_steps": STEPS, "guidance_scale": 7.5}
    assert_both_draw_the_same(*both(kind, channels), **usual | options)


@pytest.mark.parametrize(
    ("channels", "strength"), [(PLAIN, 1.0), (PLAIN, 0.6), (WITH_CHANNELS, 1.0), (WITH_CHANNELS, 0.6)]
)
@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_draws_of_the_generator_before_the_steps_noise(kind, channels, strength, both):
    """The steps' noise shows whether all earlier draws were made."""
    theirs, ours = both(kind, channels)
    scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(theirs.scheduler.config)
    theirs = of_same_parts(INPAINTING, kind, theirs, scheduler=scheduler)
    theirs.unet.register_to_config(sample_size=8)
    options = {"image": picture(), "mask_image": mask(), "strength": strength, "num_inference_steps": STEPS}
    assert_both_draw_the_same(theirs, ours.with_scheduler(scheduler), **options)


CROPS = {
    "margin": {"padding_mask_crop": 4},
    "none": {"padding_mask_crop": 0},
    "large": {"padding_mask_crop": 1000},
    "wide": {"padding_mask_crop": 2} | WIDE,
    "weak": {"padding_mask_crop": 4, "strength": 0.5},
}


PLACES = [(8, 10, 20, 14), (0, 0, 5, 30), (30, 20, 48, 36), (20, 3, 22, 5)]


@pytest.mark.parametrize(("case", "place"), product(list(CROPS), PLACES, together=1))
def test_crops(case, place, both):
    white = Image.new("L", (48, 36))
    white.paste(255, place)
    options = {"image": picture(width=48, height=36), "mask_image": white, "num_inference_steps": 3, "strength": 1.0}
    (_, ours), (_, theirs) = (
        draw(pipe, output_type="pil", **options | CROPS[case]) for pipe in reversed(both("sd1", PLAIN))
    )
    assert ours[0].size == theirs[0].size == (48, 36)
    levels = np.abs(np.asarray(ours[0], dtype=int) - np.asarray(theirs[0], dtype=int))
    assert levels.max() <= 1 and (levels == 0).mean() > 0.98


@pytest.mark.parametrize("radius", [2.5, 6])
def test_blur(radius, both):
    theirs, ours = both("sd1", PLAIN)
    soft = theirs.mask_processor.blur(mask(), radius)
    options = {"image": picture(), "num_inference_steps": 4}
    expected = draw(theirs, mask_image=soft, **options)
    assert_same(draw(ours, mask_image=mask(), mask_blur=radius, **options), expected)
    levels = draw(theirs, mask_image=as_array(soft), **options)  # arrays are resized in another way
    assert_same(draw(ours, mask_image=np.asarray(mask()), mask_blur=radius, **options), levels)
    with pytest.raises(AssertionError):
        assert_same(draw(ours, mask_image=mask(), **options), expected)


# diffusers' pipeline sets PNDM's skip_prk_steps, so it does not run pndm-rk
NAMES = [name for name in SCHEDULERS if SCHEDULERS[name] != "FlowMatchEulerDiscreteScheduler" and name != "pndm-rk"]
FIRST = [*{SCHEDULERS[name]: name for name in reversed(NAMES)}.values()]  # the first name of each class
QUICK = FIRST[::2]  # the others are quick in test_image_to_image.py


@pytest.mark.parametrize("strength", [0.6, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_schedulers(name, strength, both):
    theirs, ours = both("sd1", PLAIN)
    scheduler = getattr(diffusers, SCHEDULERS[name]).from_config(
        {**theirs.scheduler.config, "clip_sample": False}, **SCHEDULER_OPTIONS.get(name, {})
    )
    theirs = of_same_parts(INPAINTING, "sd1", theirs, scheduler=scheduler)
    theirs.unet.register_to_config(sample_size=8)
    ours = ours.with_scheduler(theirs.scheduler)
    options = {"image": picture(), "mask_image": mask(), "strength": strength, "num_inference_steps": 10}
    (found, our_pictures), (wanted, their_pictures) = draw(ours, **options), draw(theirs, **options)
    found, wanted = (
        [(round(timestep, 3), x) for timestep, x in each] for each in (found, wanted)
    )  # dpm2's are between
    assert_same((found, our_pictures), (wanted, their_pictures))

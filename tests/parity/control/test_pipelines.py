"""Pipelines with ControlNets against diffusers' in float32: one generator, the latents of every step, the pictures."""

import functools

import diffusers
import numpy as np
import pytest
import torch

from tests.parity.control.pipelines import controlled
from tests.parity.image_starts.pictures import as_array, as_tensor, mask, picture
from tests.support.text_parity import assert_both_draw_the_same, assert_same, draw

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword",
        "ignore:__array_wrap__ must accept context",
        "ignore:Passing `image` as a list of 4d:FutureWarning",
        "ignore:You have passed .* text prompts:FutureWarning",
    ),
]
SEVERAL = {"prompt": ["a cat", "riding"], "num_images_per_prompt": 2}
STEPS = {"num_inference_steps": 4}
CONTROL = picture(5)

ONE = {
    "default": {},
    "scale": {"controlnet_conditioning_scale": 0.4},
    "guess": {"guess_mode": True, "guidance_scale": 3.0},
    "guess-unguided": {"guess_mode": True, "guidance_scale": 1.0},
    "unguided": {"guidance_scale": 1.0},
    "start": {"control_guidance_start": 0.5},
    "end": {"control_guidance_end": 0.6},
    "between": {"control_guidance_start": 0.2, "control_guidance_end": 0.8, "guess_mode": True},
    "prompts": SEVERAL,
    "pictures": SEVERAL | {"image": [picture(5), picture(6)]},
    "generators": SEVERAL | {"seed": [3, 4, 5, 6]},
    "odd-size": {"image": picture(5, width=23, height=17)},
    "resized": {"height": 12, "width": 28},
    "array": {"image": as_array(picture(5, width=23, height=17))[None], "height": 20},
    "tensor": {"image": as_tensor(picture(5, width=23, height=17))[None]},
    "negative-tensor": {"image": 2 * as_tensor(CONTROL)[None] - 1},
    "tensors": SEVERAL | {"image": torch.stack([as_tensor(picture(5)), as_tensor(picture(6))])},
    "latents": {"latents": torch.randn(1, 4, 8, 10, generator=torch.Generator().manual_seed(8))},
    "latent": {"output_type": "latent"},
}
NETS = {
    "pooled": {"global_pool_conditions": True},
    "bgr": {"controlnet_conditioning_channel_order": "bgr"},
    "no-attention": {"down_block_types": ("DownBlock2D",) * 2, "mid_block_type": "UNetMidBlock2D"},
}
PAIR = [picture(5), picture(6, width=30)]
TWO = {
    "default": {},
    "scales": {"controlnet_conditioning_scale": [0.4, 1.3]},
    "scale": {"controlnet_conditioning_scale": 0.5},
    "guess": {"guess_mode": True},
    "starts": {"control_guidance_start": [0.0, 0.5], "control_guidance_end": [0.5, 1.0]},
    "never-both": {"control_guidance_start": [0.0, 0.75], "control_guidance_end": [0.25, 1.0], "guess_mode": True},
    "a-scale-of-zero": {"controlnet_conditioning_scale": [0.0, 1.0]},
    "tensors": SEVERAL | {"image": [as_tensor(picture(1))[None], torch.stack([as_tensor(picture(i)) for i in (2, 3)])]},
}
MASKED = {
    "default": {},
    "weak": {"strength": 0.6, "controlnet_conditioning_scale": 0.9},
    "guess": {"guess_mode": True, "control_guidance_end": 0.5},
    "resized": {"height": 24, "width": 16},
    "several": SEVERAL | {"image": [picture(0), picture(1)], "mask_image": [mask(0), mask(1)]},
}
STARTED = {
    "default": {},
    "weak": {"strength": 0.5, "control_guidance_start": 0.5},
    "guess": {"guess_mode": True, "controlnet_conditioning_scale": 0.6},
    "several": SEVERAL | {"image": [picture(0), picture(1)], "control_image": [picture(5), picture(6)]},
    "resized": {"height": 12, "width": 16, "control_image": picture(5, width=33)},
}
KINDS = ("sd1", "sdxl", "sd2")


@pytest.fixture(scope="module")
def made(text_pipes):
    """Return `controlled` of tiny pipelines, which makes each pair once. Tests must not change them."""
    return functools.cache(
        lambda start, kind, count=1, **options: controlled(start, kind, text_pipes(kind), count, **options)
    )


def of_kinds(cases: dict) -> list:
    """Return each case with each kind of model: quick with one of SD 1 and SDXL in turn."""
    return [
        pytest.param(kind, options, id=f"{kind}-{case}", marks=[] if kind == KINDS[i % 2] else pytest.mark.slow)
        for i, (case, options) in enumerate(cases.items())
        for kind in KINDS
    ]


@pytest.mark.parametrize(("kind", "options"), of_kinds(ONE))
def test_one_controlnet(kind, options, made):
    pipes = made("text", kind)
    assert_both_draw_the_same(*pipes, **{"image": CONTROL} | STEPS | options)


@pytest.mark.parametrize(("kind", "options"), of_kinds(NETS))
def test_options_of_a_controlnet(kind, options, made):
    pipes = made("text", kind, **options)
    assert_both_draw_the_same(*pipes, image=CONTROL, **STEPS)


@pytest.mark.parametrize(("kind", "options"), of_kinds(TWO))
def test_two_controlnets(kind, options, made):
    pipes = made("text", kind, count=2)
    assert_both_draw_the_same(*pipes, **{"image": PAIR, "height": 16, "width": 20} | STEPS | options)


@pytest.mark.parametrize("seed", [5, [1, 2, 3, 4]], ids=["generator", "generators"])
def test_pictures_of_each_prompt(seed, made):
    """A list for each prompt, of a picture for each ControlNet. diffusers has it for SD 1 and 2 alone."""
    pipes = made("text", "sd1", count=2)
    pictures = [[picture(1), picture(2)], [picture(3), picture(4)]]
    assert_both_draw_the_same(*pipes, image=pictures, seed=seed, **SEVERAL | STEPS)


@pytest.mark.parametrize(("kind", "options"), of_kinds(STARTED))
def test_image_to_image(kind, options, made):
    pipes = made("image", kind)
    assert_both_draw_the_same(
        *pipes, **{"image": picture(), "control_image": CONTROL, "num_inference_steps": 6} | options
    )


@pytest.mark.parametrize(("kind", "options"), of_kinds(MASKED))
def test_inpainting(kind, options, made):
    pipes = made("mask", kind)
    given = {"image": picture(), "mask_image": mask(), "control_image": CONTROL, "num_inference_steps": 6}
    assert_both_draw_the_same(*pipes, **given | options)


@pytest.mark.parametrize("guess_mode", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sdxl", pytest.param("sd1", marks=pytest.mark.slow)])
def test_inpainting_with_pooled_residuals(kind, guess_mode, made):
    """They mean guess mode, except in SDXL's inpainting."""
    pipes = made("mask", kind, global_pool_conditions=True)
    given = {"image": picture(), "mask_image": mask(), "control_image": CONTROL, "guess_mode": guess_mode}
    drawn = assert_both_draw_the_same(*pipes, **given, **STEPS)
    guessed = draw(pipes[1], **given | {"guess_mode": True}, **STEPS)
    is_same = torch.allclose(guessed[0][-1][1], drawn[0][-1][1], atol=1e-4)
    assert is_same == (guess_mode or kind == "sd1")


@pytest.mark.parametrize("kind", ["sd1", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_inpainting_of_a_part(kind, made):
    given = {"image": picture(), "mask_image": mask(), "control_image": CONTROL, "num_inference_steps": 4}
    given |= {"padding_mask_crop": 2, "output_type": "pil"}
    theirs, ours = (draw(pipe, **given) for pipe in made("mask", kind))
    assert_same(*((states, np.stack([*map(as_array, pictures)])) for states, pictures in (ours, theirs)))


def test_sizes_of_sdxl(made):
    pipes = made("text", "sdxl")
    options = {"original_size": (500, 300), "crops_coords_top_left": (3, 40), "negative_original_size": (30, 50)}
    assert_both_draw_the_same(*pipes, image=CONTROL, **STEPS, **options)
    options = {"denoising_end": 0.6, "control_guidance_end": 0.7, "output_type": "latent"}
    assert_both_draw_the_same(*pipes, image=CONTROL, num_inference_steps=6, **options)


@pytest.mark.parametrize("name", ["PNDMScheduler", "HeunDiscreteScheduler"])
def test_a_share_of_all_model_calls(name, text_pipes):
    """Start and end are shares of the model calls, of which PNDM has one more than steps, and Heun nearly twice."""
    theirs, ours = controlled("text", "sd1", text_pipes("sd1"))
    options = {"skip_prk_steps": True} if name == "PNDMScheduler" else {}
    theirs.scheduler = getattr(diffusers, name).from_config(theirs.scheduler.config, **options)
    given = {"image": CONTROL, "control_guidance_start": 0.25, "control_guidance_end": 0.75, **STEPS}
    assert_both_draw_the_same(theirs, ours.with_scheduler(theirs.scheduler), **given)


def test_the_picture_and_the_scale_count(made):
    """The comparisons above can fail."""
    _, ours = made("text", "sd1")
    first = draw(ours, image=CONTROL)
    for options in ({"image": picture(6)}, {"controlnet_conditioning_scale": 0.9}, {"guess_mode": True}):
        with pytest.raises(AssertionError):
            assert_same(draw(ours, **{"image": CONTROL} | options), first)

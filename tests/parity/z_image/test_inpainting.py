"""Inpainting of Z-Image against diffusers' ZImageInpaintPipeline in float32, and folders that name its classes."""

import json

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import fastdiff
from fastdiff import InputError

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a cat", "a dog and a long prompt, longer than the other one"]
LATENTS = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(8))


def picture(seed=0, size=(49, 33)):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def mask(first=8, size=(49, 33)):
    pixels = np.zeros((size[1], size[0]), np.uint8)
    pixels[first : first + 12, 10:30] = 255
    return Image.fromarray(pixels)


CASES = {
    "default-strength": {},
    "guided": {"guidance_scale": 3.0, "strength": 0.6},
    "weak": {"strength": 0.3},
    "rounded": {"strength": 0.75},
    "latents": {"latents": LATENTS},
    "latents-and-strength": {"latents": LATENTS, "strength": 0.5},
    "first-sigma-below-1": {"sigmas": [0.9, 0.5, 0.2]},
    "two-lengths": {"prompt": PROMPTS, "guidance_scale": 2.0, "strength": 0.7},
    "two-pictures": {"prompt": PROMPTS, "image": [picture(0), picture(1)], "mask_image": [mask(), mask(2)]},
    "two-masks": {"prompt": PROMPTS, "mask_image": [mask(), mask(2)], "strength": 0.6},
    "two-generators": {"prompt": PROMPTS, "seeds": [3, 4], "image": [picture(0), picture(1)], "strength": 0.6},
    "array": {"mask_image": (np.asarray(mask()) / 255).astype(np.float32), "strength": 0.6},
    "white": {"mask_image": Image.new("L", (49, 33), 255), "strength": 0.6},
    "callback": {"callback_on_step_end": lambda pipe, step, timestep, tensors: tensors, "strength": 0.6},
}


@pytest.fixture(scope="module")
def inpainting(theirs):
    pipe = diffusers.ZImageInpaintPipeline(**theirs.components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, prompt=("a cat",), seeds=1, **options):
    given = {"image": picture(), "mask_image": mask(), "num_inference_steps": 5, "guidance_scale": 0.0} | options
    generator = [torch.Generator().manual_seed(seed) for seed in seeds] if isinstance(seeds, list) else None
    generator = generator or torch.Generator().manual_seed(seeds)
    return pipe(prompt=[*prompt], generator=generator, output_type="latent", **given).images


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_latents_are_those_of_diffusers(inpainting, ours, options):
    found, wanted = draw(ours, **options), draw(inpainting, **options)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_what_is_black_is_kept_and_what_is_white_changes(ours):
    options = {"strength": 0.6, "num_inference_steps": 5, "guidance_scale": 0, "seed": 3, "output_type": "latent"}
    kept = ours("a cat", image=picture(), mask_image=Image.new("L", (49, 33)), **options).images
    found = ours("a cat", image=picture(), mask_image=mask(), **options).images
    painted = torch.zeros(16, 24, dtype=torch.bool)
    painted[4:10, 5:15] = True
    assert torch.equal(found[0, :, ~painted], kept[0, :, ~painted])
    assert (found - kept)[0, :, painted].abs().min() > 0


def test_a_picture_has_the_same_bits_in_any_batch(ours):
    options = {"image": picture(), "mask_image": mask(), "num_inference_steps": 2, "output_type": "pt"}
    together = ours(PROMPTS, seed=[3, 5], **options).images
    for place, (prompt, seed) in enumerate([(PROMPTS[0], 3), (PROMPTS[0], 5), (PROMPTS[1], 3), (PROMPTS[1], 5)]):
        assert torch.equal(ours(prompt, seed=seed, **options).images[0], together[place])


def test_only_the_part_around_the_mask_is_drawn_and_put_back(ours):
    options = {"image": picture(), "mask_image": mask(), "num_inference_steps": 2, "guidance_scale": 0, "seed": 1}
    (found,) = ours("a cat", padding_mask_crop=4, **options).images
    assert found.size == picture().size
    before, after = np.asarray(picture()), np.asarray(found)
    black = np.asarray(mask()) == 0
    assert np.array_equal(after[black], before[black]) and not np.array_equal(after, before)
    assert not np.array_equal(after, np.asarray(ours("a cat", padding_mask_crop=4, mask_blur=3, **options).images[0]))


@pytest.mark.parametrize("name", ["ZImageImg2ImgPipeline", "ZImageInpaintPipeline"])
def test_a_folder_that_names_a_class_of_the_same_parts(name, folder, ours, theirs, tmp_path):
    pipe = getattr(diffusers, name)(**theirs.components)
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == name
    loaded = fastdiff.Pipeline.from_pretrained(tmp_path, device="cpu")
    assert type(loaded) is fastdiff.ZImagePipeline and loaded.config["_class_name"] == name
    options = {"num_inference_steps": 2, "height": 16, "width": 24, "seed": 1, "output_type": "pt"}
    assert torch.equal(loaded("a cat", **options).images, ours("a cat", **options).images)
    pipe.set_progress_bar_config(disable=True)
    masks = [mask(), None] if "Inpaint" in name else []
    args = ("a cat", picture(), *masks, 0.6, 32, 48, 3, None, 2.0, False, 1.0, None, 1)
    found, wanted = (
        each(*args, torch.Generator().manual_seed(1), output_type="latent").images for each in (loaded, pipe)
    )
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


REFUSED = {
    "no-picture": ({"image": None}, "mask_image: it says where to change image; give image too"),
    "no-mask": ({"mask_image": None, "mask_blur": 2.0}, "mask_blur: only a call with mask_image takes it"),
    "masked-latents": ({"masked_image_latents": LATENTS}, "masked_image_latents: Z-Image reads no masked picture"),
    "no-step": ({"strength": 0.0}, "strength: 0 of 5 steps leaves none"),
    "nan": ({"mask_image": np.full((16, 16), np.nan)}, "mask_image: it has NaN"),
    "three-masks": ({"seeds": [1, 2], "mask_image": [mask()] * 3}, "mask_image: 3 given for 2 pictures"),
    "a-tensor-of-masks": (
        {"callback_on_step_end": print, "callback_on_step_end_tensor_inputs": ["mask"]},
        "callback_on_step_end_tensor_inputs: .*mask",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(ours, options, message):
    with pytest.raises(InputError, match=message):
        draw(ours, **options)

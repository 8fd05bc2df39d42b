"""ZImagePipeline against diffusers' pipelines in float32, on tiny models without zero weights."""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import fastdiff
from fastdiff import InputError
from fastdiff.diffusion.conditions import Guidance
from fastdiff.pipelines.captions import caption_groups
from tests.parity.z_image import tiny

SIZE = {"height": 16, "width": 24}
PROMPTS = ["a cat", "a dog and a long prompt, longer than the other one"]
GUIDED = {
    "unguided": {"guidance_scale": 0.0},
    "guided": {"guidance_scale": 4.0},
    "half-a-scale": {"guidance_scale": 0.5},
    "one-is-guided": {"guidance_scale": 1.0},
    "negative": {
        "guidance_scale": 4.0,
        "negative_prompt": ["blurry", "an ugly, blurry picture with a long list of faults"],
    },
    "bounded": {"guidance_scale": 4.0, "cfg_normalization": True},
    "bounded-below": {"guidance_scale": 4.0, "cfg_normalization": 0.5},
    "bounded-far-above": {"guidance_scale": 4.0, "cfg_normalization": 99.0},
    "truncated": {"guidance_scale": 4.0, "cfg_truncation": 0.5},
    "truncated-at-once": {"guidance_scale": 4.0, "cfg_truncation": 0.0},
    "not-truncated": {"guidance_scale": 4.0, "cfg_truncation": None},
    "sigmas": {"guidance_scale": 2.0, "sigmas": [1.0, 0.7, 0.2]},
    "short": {"guidance_scale": 2.0, "max_sequence_length": 40},
}


def seeded(seed=1):
    return torch.Generator().manual_seed(seed)


def draw(pipe, prompt=PROMPTS, **options):
    """Return the latents of a call. Texts are copied, because diffusers' pipeline changes the caller's list."""
    options = {name: [*value] if isinstance(value, list) else value for name, value in options.items()}
    given = {"num_inference_steps": 4, "output_type": "latent"} | options
    prompt = [*prompt] if isinstance(prompt, list) else prompt
    return pipe(prompt=prompt, generator=seeded(), **given).images


def assert_equal_latents(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("options", GUIDED.values(), ids=GUIDED)
def test_latents_are_those_of_diffusers(theirs, ours, options):
    assert_equal_latents(draw(ours, **SIZE, **options), draw(theirs, **SIZE, **options))


def test_pictures_are_those_of_diffusers(theirs, ours):
    options = SIZE | {"guidance_scale": 3.0, "output_type": "np"}
    pictures = draw(ours, **options)
    np.testing.assert_allclose(pictures, draw(theirs, **options), atol=1e-5)
    assert pictures.std() > 0.01


@pytest.mark.parametrize("most", [True, 0.5])
def test_a_prediction_of_zeros_is_not_normalised(most, randomise_once, tmp_path):
    """Both norms are 0."""
    pipe = tiny.pipeline(randomise_once)
    for name, parameter in pipe.transformer.named_parameters():
        if "final_layer" in name and ".linear." in name:
            parameter.data.zero_()
    pipe.save_pretrained(tmp_path)
    options = {"guidance_scale": 4.0, "cfg_normalization": most, **SIZE}
    found = draw(fastdiff.Pipeline.from_pretrained(tmp_path, device="cpu"), **options)
    assert_equal_latents(found, draw(pipe, **options))


@pytest.mark.parametrize(
    "scheduler",
    [
        {"use_dynamic_shifting": True},
        {"use_dynamic_shifting": True, "base_shift": 0.3, "max_shift": 2.0, "max_image_seq_len": 999},
        {"use_dynamic_shifting": True, "time_shift_type": "linear"},
        {"shift": 1.0, "shift_terminal": 0.1},
    ],
)
def test_shifts_are_those_of_diffusers(theirs, ours, scheduler):
    other = diffusers.ZImagePipeline(
        **theirs.components | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**scheduler)}
    )
    other.set_progress_bar_config(disable=True)
    options = SIZE | {"guidance_scale": 0.0}
    assert_equal_latents(draw(ours.with_scheduler(other.scheduler), **options), draw(other, **options))


@pytest.mark.parametrize("strength", [0.3, 0.6, 0.75, 1.0])
def test_image_to_image_is_that_of_diffusers(theirs, ours, strength):
    image_to_image = diffusers.ZImageImg2ImgPipeline(**theirs.components)
    image_to_image.set_progress_bar_config(disable=True)
    pixels = np.random.default_rng(0).integers(0, 256, (33, 49, 3), dtype=np.uint8)
    for options in ({"guidance_scale": 0.0}, {"guidance_scale": 3.0}):
        given = options | {"image": Image.fromarray(pixels), "strength": strength, "num_inference_steps": 5}
        assert_equal_latents(draw(ours, **given), draw(image_to_image, **given))


def test_the_default_strength_is_diffusers(ours):
    image = Image.new("RGB", (16, 16), "red")
    options = {"image": image, "guidance_scale": 0.0}
    assert torch.equal(draw(ours, **options), draw(ours, **options, strength=0.6))


def test_embeds_are_taken_instead_of_prompts(theirs, ours):
    embeds, away = theirs.encode_prompt([*PROMPTS], negative_prompt=["x", "y"], device="cpu")
    options = SIZE | {"guidance_scale": 3.0, "prompt_embeds": embeds, "negative_prompt_embeds": away}
    expected = draw(theirs, **SIZE, guidance_scale=3.0, negative_prompt=["x", "y"])
    assert_equal_latents(draw(ours, None, **options), expected)


def test_several_pictures_of_a_prompt(theirs, ours):
    options = SIZE | {"guidance_scale": 2.0, "num_images_per_prompt": 2, "latents": torch.randn(4, 4, 8, 12)}
    assert_equal_latents(draw(ours, **options), draw(theirs, **options))


def test_arguments_by_position_are_diffusers(theirs, ours):
    args = ("a cat", 16, 24, 3, None, 2.0, False, 1.0, None, 1)
    pictures = [pipe(*args, seeded(), output_type="latent").images for pipe in (ours, theirs)]
    assert_equal_latents(*pictures)


def test_the_callers_prompts_stay_as_they_are(ours):
    prompts, negative = [*PROMPTS], ["x", "y"]
    draw(ours, prompts, **SIZE, negative_prompt=negative, guidance_scale=2.0, num_inference_steps=1)
    assert (prompts, negative) == (PROMPTS, ["x", "y"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_picture_has_the_same_bits_in_any_batch(folder, dtype):
    pipe = fastdiff.Pipeline.from_pretrained(folder, device="cpu", dtype=dtype)
    options = SIZE | {"num_inference_steps": 3, "output_type": "pt"}
    for guidance in (0.0, 4.0):
        together = pipe(PROMPTS, seed=[3, 5], guidance_scale=guidance, **options).images
        for place, (prompt, seed) in enumerate([(PROMPTS[0], 3), (PROMPTS[0], 5), (PROMPTS[1], 3), (PROMPTS[1], 5)]):
            alone = pipe(prompt, seed=seed, guidance_scale=guidance, **options).images
            assert torch.equal(alone[0], together[place])


def test_captions_of_equal_padded_lengths_run_together():
    states = [torch.zeros(length, 24) for length in (5, 40, 20, 33)]
    size, device = (8, 12), torch.device("cpu")
    alone = caption_groups([0, 1, 2, 3, 0], states, (), None, size, device)
    assert [group.rows for group in alone] == [[0, 2, 4], [1, 3]]
    assert [len(group.of_steps[0]) for group in alone] == [2, 2]  # equal captions share a condition
    away = [torch.zeros(length, 24) for length in (5, 5, 50, 5)]
    guided = caption_groups([0, 1, 2, 3, 0], states, away, Guidance(3.0, torch.empty(0)), size, device)
    assert [group.rows for group in guided] == [[0, 4], [2], [1, 3]]
    assert guided[0].of_steps[0].guidance.null_conditions.tolist() == [1, 1]


def test_live_parts_are_taken(theirs, ours):
    live = ours.with_parts(**theirs.components)
    assert live.transformer is not ours.transformer and live.tokenizer is not ours.tokenizer
    options = SIZE | {"guidance_scale": 2.0}
    assert torch.equal(draw(live, **options), draw(ours, **options))


def test_a_saved_folder_is_read_by_diffusers(ours, tmp_path):
    ours.save_pretrained(tmp_path)
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert type(again) is diffusers.ZImagePipeline
    options = SIZE | {"guidance_scale": 2.0}
    assert_equal_latents(draw(ours, **options), draw(again, **options))
    assert torch.equal(
        draw(fastdiff.Pipeline.from_pretrained(tmp_path, device="cpu"), **options), draw(ours, **options)
    )


REFUSED = {
    "no-prompt": ({"prompt": None}, "prompt: None; give a text, or prompt_embeds"),
    "both": ({"prompt_embeds": [torch.zeros(3, 24)]}, "prompt: prompt_embeds are also given"),
    "width": ({"prompt": None, "prompt_embeds": [torch.zeros(3, 23)]}, r"prompt_embeds\[0\]: its shape is \(3, 23\)"),
    "nan": ({"prompt": None, "prompt_embeds": [torch.full((3, 24), torch.nan)]}, r"prompt_embeds\[0\]: it has NaN"),
    "no-list": ({"prompt": None, "prompt_embeds": 7}, "prompt_embeds: give a list of tensors"),
    "negative-count": ({"negative_prompt": ["a", "b", "c"]}, "negative_prompt: 3 given for 2 prompts"),
    "length": ({"max_sequence_length": 0}, "max_sequence_length: 0 is not a whole number"),
    "scale": ({"guidance_scale": -1.0}, "guidance_scale: -1.0 is not"),
    "normalization": ({"cfg_normalization": "x"}, "cfg_normalization: 'x' is not"),
    "truncation": ({"cfg_truncation": -1}, "cfg_truncation: -1 is not"),
    "height": ({"height": 18}, "height 18, width 24: both must be multiples of 4"),
    "strength": ({"strength": 0.5}, "strength: it says how much of image to change"),
    "no-step": ({"image": Image.new("RGB", (16, 16)), "strength": 0.0}, "strength: 0 of 4 steps leaves none"),
    "both-latents": ({"image": Image.new("RGB", (16, 16)), "latents": torch.zeros(2, 4, 8, 12)}, "latents: a run with"),
    "mask": ({"mask_image": Image.new("L", (16, 16))}, "mask_image: it says where to change image; give image too"),
    "eta": ({"eta": 0.5}, "eta: a flow has no eta"),
    "timesteps": ({"timesteps": [999, 5]}, "timesteps: give sigmas"),
    "unknown": ({"refiner": 1}, "refiner: Z-Image have no such argument"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(ours, options, message):
    with pytest.raises(InputError, match=message):
        draw(ours, **{"prompt": PROMPTS, **SIZE, **options})


def test_parts_that_do_not_match_are_named(theirs, ours):
    with pytest.raises(InputError, match="scheduler ddim: Z-Image predicts the velocity of a flow"):
        ours.with_scheduler(fastdiff.DDIMScheduler())("a cat", num_inference_steps=1, **SIZE)
    encoder = fastdiff.Qwen3Model.from_config(tiny.ENCODER | {"hidden_size": 16, "vocab_size": 300})
    with pytest.raises(InputError, match="text_encoder: its states have width 16, and the transformer reads 24"):
        ours.with_parts(text_encoder=encoder)
    encoder = fastdiff.Qwen3Model.from_config(tiny.ENCODER | {"vocab_size": 99})
    with pytest.raises(InputError, match="tokenizer: its ids go up to 258, and the text encoder has 99 tokens"):
        ours.with_parts(text_encoder=encoder)
    with pytest.raises(InputError, match="text_encoder: it needs its tokenizer"):
        ours.with_parts(tokenizer=None)

"""Whole text pipelines against diffusers' in float32: same noise, the latents of every step, and the pictures."""

import diffusers
import numpy as np
import pytest
import torch

from fastdiff import Pipeline
from tests.support.pairwise import product
from tests.support.text_parity import assert_both_draw_the_same, assert_same, draw
from tests.support.text_pipelines import KINDS, text_pipeline, tiny_unet, tiny_vae

ALL = pytest.mark.parametrize("kind", KINDS)
SDXL = "sdxl"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers'
]


@pytest.fixture
def both(tmp_path):
    """Return diffusers' pipeline of a kind, with some parts replaced, and ours."""

    def both(kind, **parts):
        theirs = text_pipeline(kind, **parts)
        theirs.save_pretrained(tmp_path)
        return theirs, Pipeline.from_pretrained(tmp_path, device="cpu")

    return both


@pytest.mark.parametrize("kind", ["sd1", pytest.param("sd2", marks=pytest.mark.slow), SDXL])
def test_other_words_are_another_picture(kind, text_pipes):
    """The comparison below can fail: each prompt changes the picture."""
    _, ours = text_pipes(kind)
    others = {"negative_prompt": "a dog"}
    expected = draw(ours, **others)
    names = ("prompt", "negative_prompt") + (("prompt_2", "negative_prompt_2") if kind == SDXL else ())
    drawn = {name: draw(ours, **others | {name: "astronaut riding"}) for name in names}
    for found in drawn.values():
        with pytest.raises(AssertionError):
            assert_same(found, expected)


ONE, BOTH = ("sd1",), ("sd1", SDXL)
CASES = {
    "default-steps": (BOTH, {"num_inference_steps": 50}),
    "unguided": (KINDS, {"guidance_scale": 1}),
    "guidance-below-1": (ONE, {"guidance_scale": 0.5}),
    "strong-guidance": (BOTH, {"guidance_scale": 12.5}),
    "rescaled": (KINDS, {"guidance_rescale": 0.7}),
    "rescaled-unguided": (ONE, {"guidance_rescale": 0.7, "guidance_scale": 1.0}),
    "eta": (("sd2",), {"eta": 0.6}),
    "empty-prompt": (BOTH, {"prompt": ""}),
    "long-prompt": (BOTH, {"prompt": "a cat in space " * 9}),
    "negative": (KINDS, {"negative_prompt": "trending"}),
    "negative-empty": (KINDS, {"negative_prompt": ""}),
    "prompts": (BOTH, {"prompt": ["a cat", "the astronaut riding"]}),
    "prompts-of-one": (ONE, {"prompt": ["a cat"]}),
    "negatives": (BOTH, {"prompt": ["a cat", "the astronaut"], "negative_prompt": ["dog", ""]}),
    "images-per-prompt": (BOTH, {"prompt": ["a cat", "riding"], "num_images_per_prompt": 2}),
    "generators": (("sd2", SDXL), {"prompt": ["a cat", "riding"], "seed": [1, 2]}),
    "clip-skip-0": (BOTH, {"clip_skip": 0, "negative_prompt": "dog"}),
    "clip-skip": (KINDS, {"clip_skip": 1, "negative_prompt": "dog"}),
    "wide": (BOTH, {"height": 16, "width": 40}),
    "tall": (BOTH, {"height": 24, "width": 16}),
    "only-a-height": ((SDXL,), {"height": 24}),
    "latents": (BOTH, {"latents": torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))}),
    "np": (ONE, {"output_type": "np"}),
    "latent": (BOTH, {"output_type": "latent"}),
    "second-prompt": ((SDXL,), {"prompt_2": "astronaut"}),
    "second-prompts": ((SDXL,), {"prompt": ["a cat", "riding"], "prompt_2": ["astronaut", "!!"]}),
    "second-prompt-empty": ((SDXL,), {"prompt_2": ""}),
    "second-negative": ((SDXL,), {"negative_prompt": "dog", "negative_prompt_2": "photo"}),
    "second-negative-alone": ((SDXL,), {"negative_prompt_2": "photo"}),
    "second-negative-empty": ((SDXL,), {"negative_prompt": "dog", "negative_prompt_2": ""}),
    "sizes": ((SDXL,), {"original_size": (500, 300), "target_size": (64, 8), "crops_coords_top_left": (3, 40)}),
    "negative-sizes": (
        (SDXL,),
        {
            "negative_original_size": (30, 50),
            "negative_target_size": (8, 9),
            "negative_crops_coords_top_left": (7, 0),
        },
    ),
    "half-of-the-negative-sizes": ((SDXL,), {"negative_original_size": (30, 50)}),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(
            kind,
            options,
            id=f"{kind}-{case}",
            marks=pytest.mark.slow if case == "default-steps" or kind != kinds[i % len(kinds)] else [],
        )
        for i, (case, (kinds, options)) in enumerate(CASES.items())  # make test runs one kind of most cases, in turn
        for kind in kinds
    ],
)
def test_options(kind, options, text_pipes):
    assert_both_draw_the_same(*text_pipes(kind), **options)


def test_odd_sizes(text_pipes):
    """Draw from odd latents, because diffusers accepts only heights in steps of 8, whatever the VAE's factor."""
    latents = torch.randn(1, 4, 7, 11, generator=torch.Generator().manual_seed(3))
    sizes = {"original_size": (14, 22), "target_size": (14, 22)}  # without them SDXL gets the default size
    for kind, options in (("sd1", {}), ("sdxl", {}), ("sdxl", sizes)):
        assert_both_draw_the_same(*text_pipes(kind), latents=latents, **options)


def test_pil_pictures_are_rounded_as_diffusers(text_pipes):
    theirs, ours = (draw(pipe, output_type="pil")[1][0] for pipe in text_pipes("sd1"))
    levels = np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int))
    assert levels.max() <= 1 and (levels == 0).mean() > 0.99


SCHEDULERS = {
    "ddpm": ("DDPMScheduler", {"clip_sample": False}),
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "euler-trailing": ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "dpm++2m": ("DPMSolverMultistepScheduler", {}),
    "dpm++2m-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "dpm++2m-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "unipc-karras": ("UniPCMultistepScheduler", {"use_karras_sigmas": True}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "lms-karras": ("LMSDiscreteScheduler", {"use_karras_sigmas": True}),
    "lcm": ("LCMScheduler", {}),
    "tcd": ("TCDScheduler", {}),
}


@pytest.mark.parametrize(("case", "kind"), product(list(SCHEDULERS), KINDS, together=1))
def test_schedulers(kind, case, text_pipes):
    """Schedulers built from the folder's own, also for v-prediction, with step noise in diffusers' order."""
    name, options = SCHEDULERS[case]
    theirs, ours = text_pipes(kind)
    before = theirs.scheduler
    try:
        theirs.scheduler = getattr(diffusers, name).from_config(before.config, **options)
        other = ours.with_scheduler(theirs.scheduler)
        assert_both_draw_the_same(theirs, other, num_inference_steps=5, prompt=["a cat", "riding"])
    finally:
        theirs.scheduler = before


def test_eta_reaches_the_steps_of_tcd(text_pipes):
    theirs, ours = text_pipes("sd1")
    before = theirs.scheduler
    try:
        theirs.scheduler = diffusers.TCDScheduler.from_config(before.config)
        other = ours.with_scheduler(theirs.scheduler)
        assert_both_draw_the_same(theirs, other, num_inference_steps=4, prompt="a cat", eta=0.3)
    finally:
        theirs.scheduler = before


def embeds_of(theirs, kind, prompt):
    """Return the embeddings of a prompt and of an empty prompt, by argument name."""
    made = theirs.encode_prompt(prompt, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return {name: embeds.detach() for name, embeds in zip(names, made, strict=False)}


@pytest.mark.parametrize(
    ("given", "kind"), product(["both", "prompts", "negatives", "two-of-each"], KINDS[::-1], together=1)
)
def test_embeddings(kind, given, text_pipes):
    """Draw from embeddings of prompts, negative prompts, or both, with strings for the other side."""
    theirs, ours = text_pipes(kind)
    embeds = embeds_of(theirs, kind, ["the astronaut", "a cat"] if given == "two-of-each" else "the astronaut")
    is_negative = {name: name.startswith("negative") for name in embeds}
    if given == "prompts":
        options = {name: value for name, value in embeds.items() if not is_negative[name]} | {"prompt": None}
        options["negative_prompt"] = "dog"
    elif given == "negatives":
        options = {name: value + 1 for name, value in embeds.items() if is_negative[name]}
    else:
        options = {name: value + is_negative[name] for name, value in embeds.items()} | {"prompt": None}
    assert_both_draw_the_same(theirs, ours, **options, num_images_per_prompt=2)


def test_longer_and_shorter_embeddings(text_pipes):
    """Tools that weight prompts make such embeddings, by concatenating several texts."""
    theirs, ours = text_pipes("sd1")
    for length in (7, 61):
        embeds = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(length))
        options = {"prompt": None, "prompt_embeds": embeds[:1], "negative_prompt_embeds": embeds[1:]}
        assert_both_draw_the_same(theirs, ours, **options)


@pytest.mark.parametrize(
    "negative",
    [
        {},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ({"negative_prompt": ""}, {"negative_prompt_2": "photo"})
        ),
    ],
    ids=str,
)
def test_an_empty_negative_prompt_of_sdxl_that_is_not_zeros(both, negative):
    theirs, ours = both(SDXL, force_zeros_for_empty_prompt=False)
    assert not theirs.config.force_zeros_for_empty_prompt and not ours.zeros_for_no_prompt
    assert_both_draw_the_same(theirs, ours, **negative)


def test_sdxl_without_its_first_text_encoder(both):
    unet = tiny_unet(SDXL, cross_attention_dim=40)
    theirs, ours = both(SDXL, text_encoder=None, tokenizer=None, unet=unet)
    assert_both_draw_the_same(theirs, ours, negative_prompt="dog", clip_skip=1)


@pytest.mark.parametrize(("guidance_scale", "kind"), product([1.0, 7.5], ["sd1", SDXL], together=1))
def test_a_unet_that_is_told_the_scale_of_guidance(kind, guidance_scale, both):
    """This is LCM's U-Net. It takes one call per step at any guidance scale."""
    theirs, ours = both(kind, unet=tiny_unet(kind, time_cond_proj_dim=12))
    options = {"guidance_scale": guidance_scale, "negative_prompt": "dog", "prompt": ["a cat", "riding"]}
    assert_both_draw_the_same(theirs, ours, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"encoder_hid_dim": 32, "encoder_hid_dim_type": "text_proj", "cross_attention_dim": 20},
        {"addition_embed_type": "text", "addition_embed_type_num_heads": 4},
    ],
    ids=["encoder_hid_dim", "addition_embed_type"],
)
def test_other_readings_of_the_text(options, both):
    assert_both_draw_the_same(*both("sd1", unet=tiny_unet("sd1", **options)), prompt=["a cat", "riding"])


def test_latents_of_another_mean_and_spread(both):
    """As for SDXL's VAE. The pipelines of Stable Diffusion 1 and 2 ignore these options."""
    spread = {"latents_mean": [0.4, -0.5, 0.3, 1.0], "latents_std": [1.5, 0.5, 2.0, 3.0]}
    for kind in ("sd1", SDXL):
        theirs, ours = both(kind, vae=tiny_vae(kind, **spread))
        assert_both_draw_the_same(theirs, ours)


@pytest.mark.parametrize(
    ("kind", "start", "stop", "scheduler"),
    [
        ("sd1", 0.0, 0.5, diffusers.DDIMScheduler),
        ("sd1", 0.3, 0.75, diffusers.HeunDiscreteScheduler),
        ("sd1", 0.5, 0.5, diffusers.DDIMScheduler),
        (SDXL, 0.25, 1.0, diffusers.EulerDiscreteScheduler),
    ],
)
def test_guidance_in_a_part_of_the_run(kind, start, stop, scheduler, both, monkeypatch):
    """Against diffusers with the scale 1 in the other steps, which makes the unconditional half count nothing."""
    theirs, ours = both(kind)
    theirs.scheduler = scheduler.from_config(theirs.scheduler.config)
    ours.scheduler = theirs.scheduler
    monkeypatch.setattr(type(theirs), "do_classifier_free_guidance", True)
    options = {"num_inference_steps": 5, "negative_prompt": "dog"}
    calls = len(draw(ours, **options)[0])
    first, last = int(start * calls), int(stop * calls)

    def scale(step):
        return 3.0 if first <= step < last else 1.0

    def edit(pipe, step, timestep, tensors):
        pipe._guidance_scale = scale(step + 1)
        return {}

    expected = draw(theirs, edit, guidance_scale=scale(0), **options)
    assert_same(draw(ours, guidance_scale=3.0, guidance_start=start, guidance_stop=stop, **options), expected)

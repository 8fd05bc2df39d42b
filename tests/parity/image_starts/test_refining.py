"""Parts of a run, and SDXL's refiner, against diffusers' pipelines in float32: latents of every step, and pictures."""

import copy

import diffusers
import pytest
import torch

from fastdiff import InputError, Pipeline
from tests.parity.image_starts.pictures import IMAGE_TO_IMAGE, of_same_parts, picture
from tests.support.pairwise import product
from tests.support.text_parity import assert_both_draw_the_same, assert_same, draw
from tests.support.text_pipelines import refiner_pipeline

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword",
        "ignore:__array_wrap__ must accept context",
        "ignore:You have passed .* text prompts:FutureWarning",
    ),
]
SCHEDULERS = (
    diffusers.EulerDiscreteScheduler,
    diffusers.HeunDiscreteScheduler,
    diffusers.DPMSolverMultistepScheduler,
    diffusers.DDIMScheduler,
)
STEPS = {"num_inference_steps": 10, "negative_prompt": "dog", "guidance_scale": 2.0}


@pytest.fixture(scope="module")
def base(text_pipes):
    return [*map(copy.copy, text_pipes("sdxl"))]  # `use` changes them


@pytest.fixture(scope="module")
def refiner(tmp_path_factory):
    """Return diffusers' pipeline of a refiner, which has the second text encoder alone, and ours."""
    theirs = refiner_pipeline()
    folder = tmp_path_factory.mktemp("refiner")
    theirs.save_pretrained(folder)
    return theirs, Pipeline.from_pretrained(folder, device="cpu")


def use(pipes, scheduler):
    for pipe in pipes:
        pipe.scheduler = scheduler.from_config(pipes[0].scheduler.config)


@pytest.mark.parametrize(("scheduler", "end"), product(SCHEDULERS, [0.31, 0.8, 1.0], together=1))
def test_the_first_part_of_a_run(base, scheduler, end):
    use(base, scheduler)
    assert_both_draw_the_same(*base, denoising_end=end, output_type="latent", **STEPS)
    assert base[1].denoising_end == end


@pytest.mark.parametrize(("scheduler", "share"), product(SCHEDULERS, [0.5, 0.8], together=1))
def test_the_refiner_goes_on(base, refiner, scheduler, share):
    use(base, scheduler)
    use(refiner, scheduler)
    latents = [
        pipe(
            "a cat", denoising_end=share, output_type="latent", generator=torch.Generator().manual_seed(2), **STEPS
        ).images
        for pipe in base
    ]
    assert (latents[1] - latents[0]).abs().max() <= 1e-4 * latents[0].abs().max()
    drawn = assert_both_draw_the_same(*refiner, image=latents[0], denoising_start=share, **STEPS)
    assert len(drawn[0]) < 10 * scheduler.order


CASES = {
    "picture": {"image": picture()},
    "strong": {"image": picture(), "strength": 0.7},
    "scores": {"image": picture(), "aesthetic_score": 3.0, "negative_aesthetic_score": 4.0},
    "sizes": {"image": picture(), "original_size": (20, 30), "crops_coords_top_left": (3, 4)},
    "negative-sizes": {
        "image": picture(), "negative_original_size": (7, 9), "negative_crops_coords_top_left": (1, 2)
    },
    "start-without-noise": {"image": picture(), "denoising_start": 0.6},
    "middle": {"image": picture(), "denoising_start": 0.4, "denoising_end": 0.8, "output_type": "latent"},
    "end": {"image": picture(), "strength": 0.9, "denoising_end": 0.8, "output_type": "latent"},
    "unguided": {"image": picture(), "guidance_scale": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pictures_of_the_refiner(refiner, case):
    use(refiner, diffusers.EulerDiscreteScheduler)
    assert_both_draw_the_same(*refiner, **STEPS | CASES[case])


def test_scores_change_the_picture(refiner):
    use(refiner, diffusers.EulerDiscreteScheduler)
    expected = draw(refiner[1], image=picture(), **STEPS)
    for name in ("aesthetic_score", "negative_aesthetic_score"):
        with pytest.raises(AssertionError):
            assert_same(draw(refiner[1], image=picture(), **STEPS, **{name: 9.0}), expected)


def test_a_part_of_image_to_image_of_the_base_model(base):
    use(base, diffusers.EulerDiscreteScheduler)
    pipes = of_same_parts(IMAGE_TO_IMAGE, "sdxl", base[0]), base[1]
    assert_both_draw_the_same(*pipes, image=picture(), denoising_start=0.4, denoising_end=0.9, **STEPS)


def test_scores_of_the_base_model_change_nothing(base):
    """Image to image takes them, as diffusers' pipeline does."""
    use(base, diffusers.EulerDiscreteScheduler)
    pipes = of_same_parts(IMAGE_TO_IMAGE, "sdxl", base[0]), base[1]
    drawn = assert_both_draw_the_same(
        *pipes, image=picture(), aesthetic_score=9.0, negative_aesthetic_score=1.0, **STEPS
    )
    assert_same(draw(base[1], image=picture(), **STEPS), drawn)


def test_a_saved_refiner_is_diffusers_class(refiner, tmp_path):
    refiner[1].save_pretrained(tmp_path)
    again = diffusers.StableDiffusionXLImg2ImgPipeline.from_pretrained(tmp_path)
    assert again.config.requires_aesthetics_score is True and again.text_encoder is None
    assert Pipeline.from_pretrained(tmp_path, device="cpu").diffusers_class == "StableDiffusionXLImg2ImgPipeline"


WRONG = {
    "no-picture": ("refiner", {}, "image: SDXL's refiner refines a picture"),
    "no-latents": ("base", {"denoising_start": 0.5}, "denoising_start: the run goes on from image"),
    "no-step": ("base", {"denoising_end": 0.0}, "denoising_end: 0.0 leaves no step"),
    "no-step-left": ("refiner", {"image": picture(), "denoising_start": 1.0}, "denoising_start: 1.0 leaves no step"),
    "backwards": ("base", {"image": picture(), "denoising_start": 0.5, "denoising_end": 0.5}, "denoising_end: 0.5 is"),
    "beyond": ("base", {"denoising_end": 1.5}, "denoising_end: 1.5 is not a number from 0 to 1"),
    "end-of-sd1": ("sd1", {"denoising_end": 0.8}, "denoising_end: only SDXL takes it"),
    "start-of-sd1": ("sd1", {"denoising_start": 0.8}, "denoising_start: only SDXL takes it"),
    "scores": ("base", {"aesthetic_score": 6.0}, "aesthetic_score: only SDXL's refiner takes it"),
    "score": ("refiner", {"image": picture(), "aesthetic_score": "high"}, "aesthetic_score: 'high' is not a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_one_line(base, refiner, text_pipes, case):
    whose, options, message = WRONG[case]
    _, pipe = {"base": base, "refiner": refiner, "sd1": text_pipes("sd1")}[whose]
    with pytest.raises(InputError, match=f"^{message}"):
        pipe("a cat", **STEPS, **options)

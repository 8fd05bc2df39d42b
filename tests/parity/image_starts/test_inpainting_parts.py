"""Parts of a run of SDXL's inpainting, and the refiner with a mask, against diffusers' pipeline in float32."""

import diffusers
import pytest
import torch

from fastdiff import InputError, Pipeline
from tests.parity.image_starts.pictures import PLAIN, WITH_CHANNELS, mask, picture
from tests.support.text_parity import assert_both_draw_the_same
from tests.support.text_pipelines import refiner_pipeline

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword",
        "ignore:__array_wrap__ must accept context",
        "ignore:The configuration file of the unet has set the default `sample_size`:FutureWarning",
    ),
]
SCHEDULERS = (
    diffusers.EulerDiscreteScheduler,
    diffusers.HeunDiscreteScheduler,
    diffusers.EulerAncestralDiscreteScheduler,
)
STEPS = {"num_inference_steps": 10, "mask_image": mask()}
LATENTS = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
CASES = {
    "picture": {"image": picture(), "denoising_start": 0.5},
    "end": {"image": picture(), "strength": 0.7, "denoising_end": 0.8, "output_type": "latent"},
    "middle": {"image": picture(), "denoising_start": 0.4, "denoising_end": 0.8, "output_type": "latent"},
    "strength": {"image": picture(), "denoising_start": 0.5, "strength": 0.3},
    "latents": {"image": LATENTS, "denoising_start": 0.6},
    "masked-latents": {"image": LATENTS, "masked_image_latents": 0.5 * LATENTS, "denoising_start": 0.6},
}


CALLS = [
    (case, channels) for case in CASES for channels in (PLAIN, WITH_CHANNELS) if (case, channels) != ("latents", 9)
]


@pytest.mark.parametrize(
    ("case", "channels", "scheduler"),
    [
        pytest.param(*call, scheduler, marks=[] if j == i // 2 % 2 else pytest.mark.slow)
        for i, call in enumerate(CALLS)
        for j, scheduler in enumerate(SCHEDULERS)  # make test runs Euler and Heun in turn
    ],
)
def test_a_part_of_inpainting(case, channels, scheduler, both):
    theirs, ours = both("sdxl", channels)
    theirs.scheduler = scheduler.from_config(theirs.scheduler.config)
    assert_both_draw_the_same(theirs, ours.with_scheduler(theirs.scheduler), **STEPS | CASES[case])


def test_the_refiner_inpaints(tmp_path):
    parts = refiner_pipeline().components
    theirs = diffusers.StableDiffusionXLInpaintPipeline(**parts, requires_aesthetics_score=True, add_watermarker=False)
    theirs.set_progress_bar_config(disable=True)
    theirs.unet.register_to_config(sample_size=8)
    theirs.save_pretrained(tmp_path)
    ours = Pipeline.from_pretrained(tmp_path, device="cpu")
    for options in ({"strength": 0.5, "aesthetic_score": 3.0}, {"denoising_start": 0.5}):
        assert_both_draw_the_same(theirs, ours, image=picture(), **STEPS, **options)


def test_latents_and_the_start_of_a_part_are_refused_together(both):
    with pytest.raises(InputError, match="latents: a run with denoising_start goes on from image"):
        both("sdxl", PLAIN)[1]("a cat", image=picture(), denoising_start=0.5, latents=LATENTS, **STEPS)

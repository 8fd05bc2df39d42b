"""Whole pipelines against diffusers' in float32: the same starting noise, every step and the final picture."""

import json

import diffusers
import numpy as np
import pytest
import torch

from fastdiff import Pipeline
from fastdiff.checkpoints import hub

TOLERANCE = 1e-4

DDPM_CASES = {
    "plain": {},
    "fixed-large": {"variance_type": "fixed_large"},
    "unclipped": {"clip_sample": False},
    "v-prediction": {"prediction_type": "v_prediction", "timestep_spacing": "trailing"},
    "sample-prediction": {"prediction_type": "sample"},
    "thresholding": {"thresholding": True, "sample_max_value": 3.0},
}
DDIM_CASES = {
    "plain": ({}, {}),
    "eta": ({}, {"eta": 0.7}),
    "clipped-output": ({}, {"use_clipped_model_output": True}),
    "zero-snr": (
        {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
        {"eta": 0.5, "use_clipped_model_output": True},
    ),
    "offset": ({"steps_offset": 1, "set_alpha_to_one": False, "clip_sample": False}, {}),
}


def assert_same_pictures(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_noise_is_not_a_picture():
    """The comparison below can fail: different noise gives different pictures."""
    pipe = Pipeline.from_pretrained("emoji64", device="cpu")
    pictures = pipe(num_inference_steps=2, seed=[0, 1], output_type="np").images
    with pytest.raises(AssertionError):
        assert_same_pictures(pictures[0], pictures[1])


@pytest.mark.parametrize("case", DDPM_CASES)
def test_ddpm_pipeline_given_a_generator(case, save_pipeline):
    theirs, folder = save_pipeline("DDPM", **DDPM_CASES[case])
    ours = Pipeline.from_pretrained(folder, device="cpu")
    options = {"batch_size": 2, "num_inference_steps": 5, "output_type": "np"}
    expected = theirs(generator=torch.Generator().manual_seed(5), **options).images
    assert_same_pictures(ours(generator=torch.Generator().manual_seed(5), **options).images, expected)


@pytest.mark.parametrize("case", DDIM_CASES)
def test_ddim_pipeline_given_generators(case, save_pipeline):
    scheduler, call = DDIM_CASES[case]
    theirs, folder = save_pipeline("DDIM", **scheduler)
    ours = Pipeline.from_pretrained(folder, device="cpu")
    options = {"batch_size": 2, "num_inference_steps": 5, "output_type": "np", **call}

    def generators():
        return [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    expected = theirs(generator=generators(), **options).images
    assert_same_pictures(ours(generator=generators(), **options).images, expected)


def test_learned_variance(save_pipeline):
    theirs, folder = save_pipeline("DDPM", unet={"out_channels": 6}, variance_type="learned_range")
    ours = Pipeline.from_pretrained(folder, device="cpu")
    options = {"batch_size": 2, "num_inference_steps": 5, "output_type": "np"}
    expected = theirs(generator=torch.Generator().manual_seed(5), **options).images
    assert_same_pictures(ours(generator=torch.Generator().manual_seed(5), **options).images, expected)


def test_ddim_pipeline_folder_with_another_scheduler(save_pipeline):
    """Like diffusers' DDIMPipeline, ours uses DDIM whatever scheduler the folder names."""
    _, folder = save_pipeline("DDIM")
    diffusers.PNDMScheduler().save_pretrained(folder / "scheduler")
    ours = Pipeline.from_pretrained(folder, device="cpu")
    options = {"num_inference_steps": 5, "output_type": "np"}
    theirs = diffusers.DDIMPipeline.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(generator=torch.Generator().manual_seed(0), **options).images
    assert_same_pictures(ours(generator=torch.Generator().manual_seed(0), **options).images, expected)


@pytest.mark.parametrize("said", ["DDIMScheduler", None], ids=["of-another-class", "without-a-class"])
def test_the_pipelines_index_says_which_class_the_scheduler_is(said, save_pipeline):
    """As in diffusers, the index overrides the scheduler's own config."""
    _, folder = save_pipeline("DDPM")
    path = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(path.read_text())
    del config["_class_name"]
    path.write_text(json.dumps(config | ({"_class_name": said} if said else {})))
    ours, theirs = Pipeline.from_pretrained(folder, device="cpu"), diffusers.DDPMPipeline.from_pretrained(folder)
    assert type(ours.scheduler).__name__ == type(theirs.scheduler).__name__ == "DDPMScheduler"


def test_pil_output_is_diffusers_rounding(save_pipeline):
    theirs, folder = save_pipeline("DDIM")
    ours = Pipeline.from_pretrained(folder, device="cpu")
    expected = theirs(generator=torch.Generator().manual_seed(0), num_inference_steps=3).images[0]
    (picture,) = ours(generator=torch.Generator().manual_seed(0), num_inference_steps=3, return_dict=False)[0]
    levels = np.abs(np.asarray(picture, dtype=int) - np.asarray(expected, dtype=int))
    assert levels.max() <= 1
    assert (levels == 0).mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "component", "kind", "guidance_scale"),
    [
        pytest.param(*model, scale, id=f"{model[0]}-{scale}")
        for model in (
            ("emoji64", "unet", diffusers.UNet2DModel),
            ("emoji64-dit", "transformer", diffusers.DiTTransformer2DModel),
        )
        for scale in (1.0, 2.0, 0.5)
    ],
)
def test_guidance_of_the_bundled_models(name, component, kind, guidance_scale, guided_loop):
    """The trained weights, step by step. diffusers has no pipeline for a class-conditional pixel model."""
    folder = hub.resolve(name)
    model = kind.from_pretrained(folder / component, torch_dtype=torch.float32).eval()
    scheduler = diffusers.DDIMScheduler.from_pretrained(folder / "scheduler")
    ours = Pipeline.from_pretrained(folder, device="cpu")
    latents = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    labels = [2, 0]
    expected = guided_loop(
        model, scheduler, latents, torch.tensor(labels), ours.info.null_label, guidance_scale, 4,
        use_clipped_model_output=True,
    )  # fmt: skip
    steps = ours.stream(
        latents=latents, class_labels=labels, num_inference_steps=4, guidance_scale=guidance_scale, output_type="pt"
    )
    for step, x in zip(steps, expected, strict=True):
        torch.testing.assert_close(step.x_t.permute(0, 3, 1, 2), x, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(step.images, (x / 2 + 0.5).clamp(0, 1), rtol=0, atol=TOLERANCE)

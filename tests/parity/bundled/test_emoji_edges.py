"""The bundled ControlNet against diffusers, with its trained weights in float32."""

import diffusers
import pytest
import torch
from PIL import Image, ImageDraw

from fastdiff import ControlNetModel, Pipeline
from fastdiff.checkpoints import hub
from tests.parity.control.test_models import assert_same_residuals
from tests.support.text_parity import draw

FOLDER = hub.bundled_controlnets()["emoji-edges"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers'
]


def test_diffusers_loads_the_folder_and_computes_the_same_residuals():
    theirs = diffusers.ControlNetModel.from_pretrained(FOLDER, torch_dtype=torch.float32).eval()
    ours = ControlNetModel.from_pretrained("emoji-edges")
    random = torch.Generator().manual_seed(0)
    edges = (torch.rand(2, 1, 128, 128, generator=random) < 0.05).float().expand(-1, 3, -1, -1)
    sample, text = (torch.randn(2, *shape, generator=random) for shape in ((4, 32, 32), (77, 160)))
    given = sample, torch.tensor([10, 900]), text, edges
    assert_same_residuals(theirs, ours, given, {})
    assert_same_residuals(theirs, ours, given, {"guess_mode": True, "conditioning_scale": 0.7})


def test_the_pipeline_draws_diffusers_latents():
    """With the bundled weights, the latents of each step are within 1e-4 of the largest."""
    controlnet = diffusers.ControlNetModel.from_pretrained(FOLDER, torch_dtype=torch.float32)
    theirs = diffusers.StableDiffusionControlNetPipeline.from_pretrained(
        hub.bundled_models()["emoji-sd"], controlnet=controlnet, dtype=torch.float32
    )
    theirs.set_progress_bar_config(disable=True)
    ours = Pipeline.from_pretrained("emoji-sd", controlnet="emoji-edges", device="cpu")
    picture = Image.new("RGB", (128, 128))
    ImageDraw.Draw(picture).ellipse((20, 24, 108, 112), outline="white")
    options = {"prompt": "red apple, Noto emoji", "image": picture, "num_inference_steps": 4, "guidance_scale": 5.0}
    options |= {"controlnet_conditioning_scale": 0.8, "control_guidance_end": 0.9}
    (expected, images), (found, drawn) = draw(theirs, **options), draw(ours, **options)
    assert [time for time, _ in found] == [time for time, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-4 * other.abs().max()
    assert (drawn - images).abs().max() < 1e-3
    own = {name: options[name] for name in ("prompt", "num_inference_steps", "guidance_scale")}
    (_, without), *_ = draw(ours.with_parts(controlnet=None), **own)[0]
    assert (without - found[0][1]).abs().max() > 0.01, "the edges count"

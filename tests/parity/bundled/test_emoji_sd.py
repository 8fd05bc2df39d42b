"""The bundled text model against diffusers, with its trained weights in float32: each prompt, picture by picture."""

import diffusers
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from fastdiff import Pipeline
from fastdiff.checkpoints import hub
from tests.support.text_parity import PICTURES, draw

FOLDER = hub.bundled_models()["emoji-sd"]
LATENTS = 1e-4
STEPS = 20
PROMPTS = (
    *("cat face, glossy 3D emoji", "red apple, Noto emoji", "flag: Japan", "green dog", ""),
    "woman astronaut: dark skin tone, Twemoji flat vector emoji, rocket, space",
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers'
]


@pytest.fixture(scope="module")
def both():
    """Return diffusers' pipeline and ours, loaded from the folder."""
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(FOLDER, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    return theirs, Pipeline.from_pretrained("emoji-sd", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"prompt": prompt} for prompt in PROMPTS] + [{"prompt": PROMPTS[0], "negative_prompt": "yellow"}],
    ids=[*PROMPTS, "negative-prompt"],
)
def test_prompts(both, options):
    """Both draw with the folder's guidance scale from the same noise."""
    sampling = {"num_inference_steps": STEPS, "guidance_scale": both[1].info.guidance_scale}
    (wanted, pictures), (found, own_pictures) = (draw(pipe, **options, **sampling) for pipe in both)
    assert [timestep for timestep, _ in found] == [timestep for timestep, _ in wanted]
    for (_, x), (_, expected) in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=LATENTS)
    np.testing.assert_allclose(torch.as_tensor(own_pictures), torch.as_tensor(pictures), rtol=0, atol=PICTURES)


@pytest.mark.slow
def test_the_folders_own_steps(both):
    sampling = {"num_inference_steps": both[1].info.num_inference_steps, "guidance_scale": both[1].info.guidance_scale}
    (_, pictures), (_, own_pictures) = (draw(pipe, prompt=PROMPTS[-1], **sampling) for pipe in both)
    np.testing.assert_allclose(torch.as_tensor(own_pictures), torch.as_tensor(pictures), rtol=0, atol=PICTURES)


@pytest.mark.slow
def test_a_picture_has_the_same_bits_alone_and_in_a_batch(both):
    _, ours = both
    options = {"seed": 3, "num_inference_steps": 4, "output_type": "pt"}
    batch = ours(list(PROMPTS), **options).images
    assert not any(torch.equal(batch[0], other) for other in batch[1:])
    for prompt, image in zip(PROMPTS, batch, strict=True):
        assert torch.equal(ours(prompt, **options).images[0], image)


def test_diffusers_draws_without_being_told_a_dtype():
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    (image,) = pipe(PROMPTS[0], num_inference_steps=1).images
    assert image.size == (128, 128)


def test_transformers_finds_every_weight_of_the_text_encoder():
    """The names are those of transformers 4, which only warns about other names and leaves random weights."""
    with safe_open(FOLDER / "text_encoder" / "model.safetensors", "pt") as weights:
        assert all(name.startswith("text_model.") for name in weights.keys())  # noqa: SIM118
    _, info = transformers.CLIPTextModel.from_pretrained(FOLDER / "text_encoder", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]

"""Previews of Z-Image: a linear map of 16 channels, a preview VAE if there is one, and the VAE for other latents."""

import numpy as np
import pytest
import torch

import fastdiff
from fastdiff.diffusion.latent_colors import flux_colors
from fastdiff.models.autoencoder import AutoencoderKL
from tests.parity.z_image import tiny

CALL = {"height": 16, "width": 24, "num_inference_steps": 2, "guidance_scale": 0.0}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wide(randomise_once, tmp_path_factory):
    """Return a tiny pipeline whose latents have 16 channels."""
    folder = tmp_path_factory.mktemp("wide")
    tiny.pipeline(randomise_once, channels=16).save_pretrained(folder)
    return fastdiff.Pipeline.from_pretrained(folder, device="cpu")


def test_colours_are_those_of_the_published_map():
    latents = torch.zeros(2, 1, 3, 16)
    latents[1, 0, 1, 0] = 1
    latents[1, 0, 2, 15] = -2
    latents[1, 0, 2, 6] = 10
    colors = flux_colors(latents.to(torch.bfloat16))
    assert colors.dtype == torch.float32 and colors[0].abs().max() == 0
    expected = torch.tensor([[-0.0412, 0.0149, 0.0521], [0.7302, 1.2234, 1.2716]])
    torch.testing.assert_close(colors[1, 0, 1:], expected, rtol=0, atol=1e-6)


def test_previews_have_a_pixel_for_each_latent_and_need_no_vae(wide, monkeypatch):
    steps = list(wide.stream(["a cat", "a dog"], seed=3, **CALL))
    monkeypatch.setattr(AutoencoderKL, "decode", None)
    for step in steps:
        images = step.preview()
        assert [image.size for image in images] == [(12, 8)] * 2
        shown = np.stack([np.asarray(image) for image in images]) / 127.5 - 1
        np.testing.assert_allclose(shown, flux_colors(step.x0).clamp(-1, 1), atol=0.005)
    assert steps[0].preview()[0].tobytes() != steps[1].preview()[0].tobytes()


def test_a_preview_changes_no_bit(wide):
    steps = [(step.preview(), step)[1] for step in wide.stream("a cat", seed=3, output_type="pt", **CALL)]
    assert torch.equal(steps[-1].images, wide("a cat", seed=3, output_type="pt", **CALL).images)


def test_a_preview_vae_comes_first(wide, randomise_once):
    options = {"latent_channels": 16, "encoder_block_out_channels": (8,), "decoder_block_out_channels": (8,)}
    tae = fastdiff.AutoencoderTiny.from_config(options | {"num_encoder_blocks": (1,), "num_decoder_blocks": (1,)})
    own = wide.with_parts()
    own.preview_vae = randomise_once(tae)
    (first, *_), (other, *_) = (list(pipe.stream("a cat", seed=3, **CALL)) for pipe in (own, wide))
    assert first.preview()[0].tobytes() != other.preview()[0].tobytes()


def test_latents_of_other_channels_are_decoded_by_the_vae(ours):
    step, *_ = ours.stream("a cat", seed=3, **CALL)
    (image,) = step.preview()
    assert image.size == (24, 16) and image.tobytes() == ours.decode(step.x0, "pil")[0].tobytes()

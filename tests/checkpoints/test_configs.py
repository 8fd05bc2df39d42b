"""Answers of configs beyond their options: sizes, labels, counts. tests/models holds each option against diffusers."""

import pytest

from fastdiff.checkpoints.configs.autoencoder import autoencoder_scale
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.errors import InputError


@pytest.mark.parametrize(("widths", "scale"), [([8], 1), ([8, 16], 2), ((128, 256, 512, 512), 8)])
def test_autoencoder_scale(widths, scale):
    assert autoencoder_scale({"block_out_channels": widths}) == scale


@pytest.mark.parametrize("widths", [None, [], 8, "8"])
def test_an_autoencoder_without_widths_is_refused(widths):
    with pytest.raises(InputError, match=r"^here: block_out_channels is .*; save the VAE again"):
        autoencoder_scale({"block_out_channels": widths}, "here")


@pytest.mark.parametrize(
    ("config", "good", "bad"),
    [
        pytest.param(UNet2DConfig(), [(8, 8), (16, 24)], [(4, 8), (8, 12), (0, 8)], id="unet"),
        pytest.param(DiTTransformer2DConfig(), [(2, 2), (34, 34)], [(2, 4), (3, 3), (0, 0)], id="dit"),
    ],
)
def test_sizes_that_a_model_draws(config, good, bad):
    for height, width in good:
        config.check_size(height, width)
        config.check_size(8 * height, 8 * width, scale=8)
    for height, width in bad:
        with pytest.raises(InputError, match=f"height {height}, width {width}"):
            config.check_size(height, width)


@pytest.mark.parametrize(
    ("sample_size", "trained"), [(None, None), (64, (64, 64)), ((32, 48), (32, 48))], ids=["open", "square", "wide"]
)
def test_trained_size(sample_size, trained):
    assert UNet2DConfig(sample_size=sample_size).trained_size == trained


def test_label_tables():
    assert not UNet2DConfig().takes_labels
    assert UNet2DConfig(num_class_embeds=3).takes_labels and UNet2DConfig(class_embed_type="timestep").takes_labels
    dit = DiTTransformer2DConfig(num_embeds_ada_norm=5)
    assert (dit.takes_labels, dit.num_class_embeds, dit.null_label) == (True, 6, 5)


@pytest.mark.parametrize("value", [0, 2.0, True, "2", None], ids=repr)
def test_counts_are_whole_numbers_from_1_on(value):
    with pytest.raises(InputError, match=r"in_channels: .* is not a whole number of at least 1"):
        UNet2DConfig(in_channels=value)

"""Configs: sizes, labels and bounds. tests/models compares each option with diffusers."""

import pytest

from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.checkpoints.configs.clip import CLIPTextConfig
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.configs.unet1d import UNet1DConfig
from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.errors import InputError
from fastdiff.samplers.ddpm import DDPMConfig
from tests.support.planners import policy, value_function
from tests.support.timing import at_once


@pytest.mark.parametrize(("widths", "scale"), [([8], 1), ([8, 16], 2), ((128, 256, 512, 512), 8)])
def test_autoencoder_scale(widths, scale):
    kinds = {
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
    }
    assert AutoencoderKLConfig(block_out_channels=widths, **kinds).scale == scale


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"down_block_types": ["DownBlock2D"]}, "down_block_types: block type 'DownBlock2D' is not supported; choose"),
        ({"up_block_types": ["UpBlock2D"]}, "up_block_types: block type 'UpBlock2D' is not supported; choose"),
        ({"latents_mean": [0.0] * 3}, "latents_mean: 3 given for 4 latent_channels; give one for each"),
        (
            {"block_out_channels": [8, 16]},
            "block_out_channels, down_block_types and up_block_types must have the same len",
        ),
    ],
    ids=["down", "up", "channels", "lengths"],
)
def test_stages_that_an_autoencoder_does_not_have(options, named):
    with pytest.raises(InputError, match=f"^here: {named}"):
        AutoencoderKLConfig.from_mapping(options, "here")


@pytest.mark.parametrize("widths", [None, [], 8, "8"])
def test_an_autoencoder_without_widths_is_refused(widths):
    with pytest.raises(InputError, match=r"^here: block_out_channels: .* is not a list of 1 to 12"):
        AutoencoderKLConfig.from_mapping({"block_out_channels": widths}, "here")


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


PLANNER = policy(32, 32, 64)
VALUE = value_function(8, 16, 32, downsample_each_block=False)


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        (PLANNER, (4, 8, 128), (0, 2, 6, 31)),
        (VALUE, (1, 2, 15, 16), (0, 17, 32)),
        (VALUE | {"downsample_each_block": True}, (1, 7, 32), (0, 33, 64)),
    ],
    ids=["policy", "value", "value-of-halves"],
)
def test_horizons_that_a_planner_takes(options, good, bad):
    config = UNet1DConfig(**options)
    for horizon in good:
        config.check_size(1, horizon)
        with pytest.raises(InputError, match="height 2"):
            config.check_size(2, horizon)
    for horizon in bad:
        with pytest.raises(InputError, match=f"horizon {horizon}: this "):
            config.check_size(1, horizon)


@pytest.mark.parametrize(("sample_size", "trained"), [(65_536, None), (32, (1, 32))])
def test_a_horizon_of_65536_says_nothing(sample_size, trained):
    assert UNet1DConfig(**PLANNER, sample_size=sample_size).trained_size == trained


def test_label_tables():
    assert not UNet2DConfig().takes_labels
    assert UNet2DConfig(num_class_embeds=3).takes_labels and UNet2DConfig(class_embed_type="timestep").takes_labels
    dit = DiTTransformer2DConfig(num_embeds_ada_norm=5)
    assert (dit.takes_labels, dit.num_class_embeds, dit.null_label) == (True, 6, 5)


@pytest.mark.parametrize("value", [0, 2.0, True, "2", None], ids=repr)
def test_counts_are_whole_numbers_from_1_on(value):
    with pytest.raises(InputError, match=r"in_channels: .* is not a whole number from 1 to"):
        UNet2DConfig(in_channels=value)


BILLION = 10**9


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        (UNet1DConfig, PLANNER | {"block_out_channels": (8, 8, BILLION)}, "block_out_channels: .* to 65536"),
        (UNet1DConfig, PLANNER | {"layers_per_block": BILLION}, "layers_per_block: .* from 0 to 64"),
        (UNet1DConfig, PLANNER | {"in_channels": BILLION}, "in_channels: .* to 65536"),
        (UNet1DConfig, PLANNER | {"extra_in_channels": BILLION}, "extra_in_channels: .* from 0 to 65536"),
        (UNet1DConfig, PLANNER | {"time_embedding_dim": BILLION}, "time_embedding_dim: .* to 65536"),
        (UNet1DConfig, PLANNER | {"sample_size": BILLION}, "sample_size: .* to 65536"),
        (UNet2DConfig, {"num_class_embeds": BILLION}, "num_class_embeds: .* to 100000"),
        (UNet2DConfig, {"num_train_timesteps": BILLION}, "num_train_timesteps: .* to 100000"),
        (UNet2DConfig, {"sample_size": BILLION}, "sample_size: .* to 16384"),
        (UNet2DConfig, {"sample_size": (8, BILLION)}, "sample_size: .* to 16384"),
        (UNet2DConfig, {"layers_per_block": BILLION}, "layers_per_block: .* to 64"),
        (UNet2DConfig, {"block_out_channels": (8, 8, BILLION, 8)}, "block_out_channels: .* to 65536"),
        (UNet2DConfig, {"time_embedding_dim": BILLION}, "time_embedding_dim: .* to 65536"),
        (UNet2DConfig, {"in_channels": 10**400}, "in_channels: .* to 65536"),
        (
            UNet2DConfig,
            {
                "block_out_channels": (8,) * 10_000,
                "down_block_types": ("DownBlock2D",) * 10_000,
                "up_block_types": ("UpBlock2D",) * 10_000,
            },
            "down_block_types: .* to 12",
        ),
        (DiTTransformer2DConfig, {"num_layers": BILLION}, "num_layers: .* to 1024"),
        (DiTTransformer2DConfig, {"num_embeds_ada_norm": BILLION}, "num_embeds_ada_norm: .* to 99999"),
        (DiTTransformer2DConfig, {"sample_size": BILLION}, "sample_size: .* to 16384"),
        (DiTTransformer2DConfig, {"patch_size": BILLION, "sample_size": BILLION}, "sample_size: .* to 16384"),
        (DiTTransformer2DConfig, {"num_attention_heads": BILLION}, "num_attention_heads: .* to 65536"),
        (
            DiTTransformer2DConfig,
            {"attention_head_dim": 50_000},
            "attention_head_dim: 16 heads make 800000",
        ),
        (CLIPTextConfig, {"num_hidden_layers": BILLION}, "num_hidden_layers: .* to 1024"),
        (CLIPTextConfig, {"vocab_size": BILLION}, "vocab_size: .* to 1048576"),
        (CLIPTextConfig, {"hidden_size": BILLION}, "hidden_size: .* to 65536"),
        (CLIPTextConfig, {"intermediate_size": BILLION}, "intermediate_size: .* to 65536"),
        (CLIPTextConfig, {"projection_dim": BILLION}, "projection_dim: .* to 65536"),
        (CLIPTextConfig, {"max_position_embeddings": BILLION}, "max_position_embeddings: .* to 65536"),
        (DDPMConfig, {"num_train_timesteps": BILLION}, "num_train_timesteps: .* to 100000"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_costs_without_end_is_refused_at_once(config, options, named):
    with at_once(0.1), pytest.raises(InputError, match=named):
        config(**options)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"block_out_channels": [8] * 100_000}, "block_out_channels: .* to 12"),
        ({"block_out_channels": [8, BILLION]}, "block_out_channels: .* to 65536"),
        ({"layers_per_block": BILLION}, "layers_per_block: .* to 64"),
        ({"latent_channels": BILLION}, "latent_channels: .* to 65536"),
    ],
)
def test_an_autoencoder_without_end_is_refused(option, named):
    with pytest.raises(InputError, match=f"^here: {named}"):
        AutoencoderKLConfig.from_mapping({"block_out_channels": [8, 16]} | option, "here")


def test_the_largest_of_real_models_pass():
    UNet2DConfig(num_class_embeds=21_842, sample_size=(4320, 7680), num_train_timesteps=10_000, layers_per_block=6)
    DiTTransformer2DConfig(num_layers=80, num_attention_heads=64, attention_head_dim=128, num_embeds_ada_norm=21_841)
    DDPMConfig(num_train_timesteps=10_000)

"""UNet2DModel against diffusers' in float32: each option at least once, on tiny models without zero weights."""

import diffusers
import pytest
import torch

from fastdiff import UNet2DModel
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.weights import load_weights
from tests.support.pairwise import each_option

BASE = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "layers_per_block": 2,
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


def blocks(down: str, up: str, **options) -> dict:
    return {"down_block_types": tuple(down.split()), "up_block_types": tuple(up.split()), **options}


CASES = {
    "plain": {},
    "one-head": {"attention_head_dim": None},
    "head-width-does-not-divide": {"attention_head_dim": 24},
    "downsample-padding-0": {"downsample_padding": 0},
    "resnet-resampling-in-attention-blocks": blocks(
        "AttnDownBlock2D DownBlock2D", "UpBlock2D AttnUpBlock2D", downsample_type="resnet", upsample_type="resnet"
    ),
    "attention-up-resnet": blocks(
        "AttnDownBlock2D DownBlock2D", "AttnUpBlock2D UpBlock2D", upsample_type="resnet", downsample_type=None
    ),
    "resnet-resampling-blocks": blocks("ResnetDownsampleBlock2D DownBlock2D", "ResnetUpsampleBlock2D UpBlock2D"),
    "skip": blocks("SkipDownBlock2D SkipDownBlock2D", "SkipUpBlock2D SkipUpBlock2D"),
    "skip-attention": blocks("AttnSkipDownBlock2D AttnSkipDownBlock2D", "AttnSkipUpBlock2D AttnSkipUpBlock2D"),
    "skip-narrow-groups": blocks(
        "SkipDownBlock2D SkipDownBlock2D", "SkipUpBlock2D AttnSkipUpBlock2D", block_out_channels=(32, 16)
    ),
    "skip-no-groups": blocks(
        "SkipDownBlock2D AttnSkipDownBlock2D", "AttnSkipUpBlock2D SkipUpBlock2D", norm_num_groups=None
    ),
    "skip-among-others": blocks("SkipDownBlock2D DownBlock2D", "UpBlock2D SkipUpBlock2D"),
    "k": blocks("KDownBlock2D KDownBlock2D", "KUpBlock2D KUpBlock2D", act_fn="gelu"),
    "k-without-groups": blocks("KDownBlock2D KDownBlock2D", "KUpBlock2D KUpBlock2D", norm_num_groups=None),
    "k-one-layer": blocks("KDownBlock2D KDownBlock2D", "KUpBlock2D KUpBlock2D", layers_per_block=1),
    "early-block-names": blocks("UNetResDownBlock2D UNetResAttnDownBlock2D", "UNetResAttnUpBlock2D UNetResUpBlock2D"),
    "no-mid-block": {"mid_block_type": None},
    "mid-block-without-attention": {"add_attention": False},
    "mid-block-scale": {"mid_block_scale_factor": 1.5},
    "fourier": {"time_embedding_type": "fourier"},
    "learned-time": {"time_embedding_type": "learned", "num_train_timesteps": 1000},
    "ddpm-time": {"flip_sin_to_cos": False, "freq_shift": 1, "norm_eps": 1e-6},
    "odd-time-width": {"block_out_channels": (25, 50), "norm_num_groups": 5, "attention_head_dim": 5},
    "time-width": {"time_embedding_dim": 40},
    "class-table": {"num_class_embeds": 5},
    "class-timestep": {"class_embed_type": "timestep"},
    "class-identity": {"class_embed_type": "identity"},
    "class-fourier-timestep": {"class_embed_type": "timestep", "time_embedding_type": "fourier"},
    "scale-shift": {"resnet_time_scale_shift": "scale_shift"},
    "scale-shift-attention-groups": {"resnet_time_scale_shift": "scale_shift", "attn_norm_num_groups": 4},
    "attention-groups": {"attn_norm_num_groups": 4},
    "centred-input": {"center_input_sample": True},
    "mish": {"act_fn": "mish"},
    "relu": {"act_fn": "relu"},
    "gelu": {"act_fn": "gelu"},
    "swish": {"act_fn": "swish"},
    "one-level": blocks("AttnDownBlock2D", "AttnUpBlock2D", block_out_channels=(24,)),
    "three-levels-growing-unevenly": blocks(
        "DownBlock2D AttnDownBlock2D DownBlock2D", "UpBlock2D UpBlock2D AttnUpBlock2D", block_out_channels=(8, 40, 24)
    ),
    "other-channels": {"in_channels": 4, "out_channels": 8, "block_out_channels": (24, 40)},
    "learned-variance-of-one-channel": {"in_channels": 1, "out_channels": 2},
    "three-layers": {"layers_per_block": 3},
    "dropout": {"dropout": 0.3},
}


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max().item()
    assert error <= 1e-4
    assert error <= 2e-5 * theirs.abs().max().item()


def class_labels(config: dict) -> torch.Tensor | None:
    if "num_class_embeds" in config:
        return torch.tensor([1, 4])
    return {"timestep": torch.tensor([10.0, 400.0]), "identity": torch.randn(2, 128)}.get(
        config.get("class_embed_type")
    )


@pytest.mark.parametrize("case", each_option(CASES))
def test_option(case, randomise):
    config = BASE | CASES[case]
    theirs = randomise(diffusers.UNet2DModel(**config))
    with torch.device("meta"):
        ours = UNet2DModel.from_config(theirs.config)
    load_weights(ours, theirs.state_dict(), source=case, dtype=torch.float32, device="cpu")
    sample = torch.randn(2, config.get("in_channels", 3), 16, 24)  # not square, and not sample_size
    timesteps, labels = torch.tensor([7, 801]), class_labels(config)
    with torch.no_grad():
        expected = theirs(sample, timesteps, labels).sample
    assert_close(ours(sample, timesteps, labels).sample, expected)


@pytest.mark.parametrize("timestep", [0, 999, 12.5, torch.tensor(12.5), torch.tensor([500])], ids=str)
def test_timestep_forms(timestep, randomise):
    theirs = randomise(diffusers.UNet2DModel(**BASE))
    ours = UNet2DModel.from_config(theirs.config)
    ours.to_empty(device="meta")
    load_weights(ours, theirs.state_dict(), source="model", dtype=torch.float32, device="cpu")
    sample = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = theirs(sample, timestep, return_dict=False)[0]
    assert_close(ours(sample, timestep, return_dict=False)[0], expected)


def test_bundled_weights():
    folder = hub.resolve("emoji64") / "unet"
    theirs = diffusers.UNet2DModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    ours = UNet2DModel.from_pretrained("emoji64")
    sample, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 216])
    for timestep in (999, 500, 20):
        with torch.no_grad():
            expected = theirs(sample, timestep, labels).sample
        assert_close(ours(sample, timestep, labels).sample, expected)

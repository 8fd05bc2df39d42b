"""UNet1DModel against diffusers' in float32: policies and value functions with each of their options."""

import diffusers
import pytest
import torch

from fastdiff import UNet1DModel
from fastdiff.checkpoints.weights import load_weights
from tests.support.pairwise import product
from tests.support.planners import policy, value_function

HOPPER, WALKER = {"in_channels": 14, "out_channels": 14}, {"in_channels": 23, "out_channels": 23}
UP = "UpResnetBlock1D"
POLICIES = {
    "hopper-hor32": policy(32, 64, 128, 256),
    "hopper-hor128": policy(32, 128, 256),
    "walker-4-levels": policy(32, 64, 128, 256, **WALKER),
    "walker-3-levels": policy(32, 128, 256, **WALKER),
}
OPTIONS = {
    "up-block-for-each": policy(8, 16, 24, up_block_types=(UP,) * 3),
    "one-level": policy(16),
    "one-level-one-up": policy(16, up_block_types=(UP,)),
    "narrowing": policy(32, 16, 8),
    "as-wide-as-two": policy(16, 8, 16),  # the residual of a pair without a convolution
    "no-out-block": policy(8, 16, out_block_type=None, out_channels=16),
    "other-channels": policy(8, 16, in_channels=3, out_channels=5),
    "extra-channels": policy(8, 16, extra_in_channels=3),
    "no-further-layers": policy(8, 16, layers_per_block=0),
    "two-further-layers": policy(8, 16, layers_per_block=2),
    "fourier": policy(8, 16, time_embedding_type="fourier"),
    "fourier-flipped": policy(8, 16, time_embedding_type="fourier", time_embedding_dim=48, flip_sin_to_cos=True),
    "time-width-of-no-use": policy(8, 16, time_embedding_dim=47),
    "flipped": policy(8, 16, flip_sin_to_cos=True, freq_shift=0.5),
    "groups": policy(24, 16, norm_num_groups=3),
    "no-groups": policy(24, 16, norm_num_groups=None),
    "silu": policy(8, 16, act_fn="SiLU"),
    "swish": policy(8, 16, act_fn="swish"),
    "gelu": policy(8, 16, act_fn="gelu"),
    "relu": policy(8, 16, act_fn="relu"),
}
VALUES = {
    "hopper": (value_function(32, 64, 128, 256), (1, 4, 16, 32, 63, 64)),
    "walker-3-levels": (value_function(32, 128, 256, **WALKER), (16, 32)),
    "whole-last-block": (value_function(8, 16, 32, downsample_each_block=False), (1, 13, 16)),
    "relu": (value_function(8, 64, act_fn="relu", layers_per_block=0), (16,)),
    "groups-of-no-use": (value_function(8, 32, norm_num_groups=7), (15,)),
    "fourier": (value_function(8, 32, time_embedding_type="fourier"), (16,)),
}


@pytest.fixture
def pair(randomise):
    """Build diffusers' model with random weights, and ours with the same weights."""

    def build(config: dict) -> tuple[diffusers.UNet1DModel, UNet1DModel]:
        theirs = randomise(diffusers.UNet1DModel(**config))
        with torch.device("meta"):
            ours = UNet1DModel.from_config(config)
        load_weights(ours, theirs.state_dict(), source="diffusers", dtype=torch.float32, device="cpu")
        return theirs, ours

    return build


def sample_of(model, n: int, horizon: int) -> torch.Tensor:
    return torch.randn(n, model.config.sample_channels, horizon, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def check(theirs, ours, horizon: int, timestep) -> None:
    sample = sample_of(ours, 2, horizon)
    expected, output = theirs(sample, timestep).sample, ours(sample, timestep).sample
    assert output.shape == expected.shape
    assert expected.abs().max() > 1e-2
    error = (output - expected).abs().max()
    assert error <= 1e-4
    assert error <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(("name", "horizon"), product(list(POLICIES), [16, 32, 128], together=1))
def test_policies(pair, name, horizon):
    theirs, ours = pair(POLICIES[name])
    for timestep in (0, 57, torch.tensor(57), torch.tensor([3, 99])):
        check(theirs, ours, horizon, timestep)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_policies(pair, name):
    check(*pair(OPTIONS[name]), 12, torch.tensor([3, 99]))


@pytest.mark.parametrize("name", VALUES)
def test_value_functions(pair, name):
    config, horizons = VALUES[name]
    theirs, ours = pair(config)
    for horizon in horizons:
        check(theirs, ours, horizon, torch.tensor([3, 99]))


def test_one_timestep_for_all_values(pair):
    """diffusers accepts a number only for a single trajectory."""
    theirs, ours = pair(VALUES["hopper"][0])
    sample = sample_of(ours, 3, 32)
    with torch.no_grad():
        expected = theirs(sample, torch.full((3,), 57)).sample
    for timestep in (57, torch.tensor(57), torch.tensor([57])):
        torch.testing.assert_close(ours(sample, timestep).sample, expected, rtol=0, atol=1e-4)


def test_folders_that_diffusers_saved(randomise, tmp_path):
    for name, config in {"policy": POLICIES["hopper-hor32"], "value": VALUES["hopper"][0]}.items():
        theirs = randomise(diffusers.UNet1DModel(**config))
        theirs.save_pretrained(tmp_path / name)
        check(theirs, UNet1DModel.from_pretrained(tmp_path / name), 32, torch.tensor([3, 99]))

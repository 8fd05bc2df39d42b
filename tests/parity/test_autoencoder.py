"""AutoencoderKL against diffusers' own in float32: each option, decode, encode, the distribution, tiles."""

import diffusers
import pytest
import torch

from fastdiff import AutoencoderKL
from tests.support.pairwise import product

BASE = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "sample_size": 32,
}
DEEP = {  # the levels of SD and SDXL
    "block_out_channels": (8, 8, 16, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
OPTIONS = {
    "base": {},
    "sd": DEEP,
    "one-level": {
        "block_out_channels": (8,),
        "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",),
    },
    "attention": {
        "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        "up_block_types": ("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        "layers_per_block": 2,
    },
    "attention-everywhere": {
        "down_block_types": ("AttnDownEncoderBlock2D",) * 2,
        "up_block_types": ("AttnUpDecoderBlock2D",) * 2,
    },
    "early-names": {
        "down_block_types": ("UNetResDownEncoderBlock2D",) * 2,
        "up_block_types": ("UNetResUpDecoderBlock2D",) * 2,
    },
    "no-mid-attention": {"mid_block_add_attention": False},
    "no-quant-convs": {"use_quant_conv": False, "use_post_quant_conv": False},
    "channels": {"in_channels": 1, "out_channels": 5, "latent_channels": 16},
    "layers": {"layers_per_block": 3},
    "groups": {"norm_num_groups": 8},
    "sd3-scales": {"shift_factor": 0.06, "scaling_factor": 1.5, "latents_mean": (0.1,) * 4, "latents_std": (2.0,) * 4},
    "two-sample-sizes": {"sample_size": (16, 24)},
    "no-upcast": {"force_upcast": False},
    **{name: {"act_fn": name} for name in ("swish", "mish", "gelu", "relu")},
}


@pytest.fixture
def pair(tmp_path, randomise):
    """Return diffusers' model and ours, loaded from the same files."""

    def build(**options):
        theirs = randomise(diffusers.AutoencoderKL(**BASE | options))
        theirs.save_pretrained(tmp_path)
        return theirs.requires_grad_(False), AutoencoderKL.from_pretrained(tmp_path)

    return build


def assert_close(ours, theirs) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


@pytest.mark.parametrize(("name", "size"), product(list(OPTIONS), [(5, 12), (8, 8), (1, 3)], together=1))
def test_decode(pair, name, size):
    theirs, ours = pair(**OPTIONS[name])
    z = torch.randn(2, theirs.config.latent_channels, *size)
    assert_close(ours.decode(z).sample, theirs.decode(z).sample)


@pytest.mark.parametrize(("name", "size"), product(list(OPTIONS), [(19, 24), (16, 16)], together=1))
def test_encode(pair, name, size):
    theirs, ours = pair(**OPTIONS[name])
    x = torch.randn(2, theirs.config.in_channels, *size)
    expected, found = theirs.encode(x).latent_dist, ours.encode(x).latent_dist
    for what in ("parameters", "mean", "logvar", "std", "var"):
        assert_close(getattr(found, what), getattr(expected, what))
    assert_close(found.mode(), expected.mode())


@pytest.mark.parametrize("count", [1, 2], ids=["one generator", "one a picture"])
def test_a_sample_of_the_distribution(pair, count):
    theirs, ours = pair()
    x = torch.randn(2, 3, 8, 8)

    def draw(model):
        generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
        return model.encode(x).latent_dist.sample(generators[0] if count == 1 else generators)

    assert_close(draw(ours), draw(theirs))


def test_a_call(pair):
    theirs, ours = pair()
    x = torch.randn(2, 3, 8, 8)
    assert_close(ours(x).sample, theirs(x).sample)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    found, expected = (
        model(x, sample_posterior=True, generator=generator).sample
        for model, generator in zip((ours, theirs), generators, strict=True)
    )
    assert_close(found, expected)


TILED = {
    "its own tiles": {},
    "large tiles": {"tile_sample_min_size": 48, "tile_latent_min_size": 24},
    "half overlap": {"tile_overlap_factor": 0.5},
    "no overlap": {"tile_overlap_factor": 0.0},
}


@pytest.mark.parametrize(("name", "size"), product(list(TILED), [(40, 56), (17, 30), (16, 33), (16, 16)], together=1))
def test_tiles(pair, name, size):
    """With 16 latents per tile: many tiles, narrow last tiles, and a picture of a single tile."""
    theirs, ours = pair()
    for model in (theirs, ours):
        model.enable_tiling()
        for attribute, value in TILED[name].items():
            setattr(model, attribute, value)
    z, x = torch.randn(2, 4, *size), torch.randn(2, 3, *(2 * side for side in size))
    assert_close(ours.decode(z).sample, theirs.decode(z).sample)
    assert_close(ours.encode(x).latent_dist.parameters, theirs.encode(x).latent_dist.parameters)
    ours.disable_tiling()
    whole = ours.decode(z).sample
    theirs.disable_tiling()
    assert_close(whole, theirs.decode(z).sample)


def steps_across(pictures, column):
    """Return the mean change of values from the previous column to this one."""
    return (pictures[..., column] - pictures[..., column - 1]).abs().mean()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0.25, 0.0], ids=["blended", "not blended"])
def test_tiles_leave_no_step_at_their_seams(randomise, overlap):
    """Compare with the picture decoded as a whole. Without overlap there are steps, so the test can fail."""
    wide = {"block_out_channels": (16, 16, 32, 32), "sample_size": 256}
    vae = randomise(AutoencoderKL.from_config(BASE | DEEP | wide))
    z = torch.randn(1, 4, 80, 80, generator=torch.Generator().manual_seed(0))
    whole = vae.decode(z).sample
    vae.tile_overlap_factor = overlap
    vae.enable_tiling()
    error = vae.decode(z).sample - whole
    psnr = 20 * torch.log10((whole.max() - whole.min()) / error.square().mean().sqrt())
    usual = torch.stack([steps_across(error, column) for column in range(1, 640)]).mean()
    tile = int(256 * (1 - overlap))
    steps = [steps_across(error, seam) / usual for seam in range(tile, 640, tile)]
    assert (psnr > 35) == (max(steps) < 2) == (overlap > 0), (psnr, steps)

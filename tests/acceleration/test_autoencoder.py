"""accelerate on a live diffusers AutoencoderKL."""

import diffusers
import pytest
import torch

import fastdiff
from tests.support.text_pipelines import VAE

Z = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
CONFIGS = {
    "plain": {},
    "no-quant": {"use_quant_conv": False, "use_post_quant_conv": False},
    "no-attention": {"mid_block_add_attention": False},
}


@pytest.fixture
def vae(randomise):
    return randomise(diffusers.AutoencoderKL(**VAE))


@torch.no_grad()
def both(vae, function):
    """Return the result of diffusers, then ours."""
    expected = function(vae)
    return expected, function(fastdiff.accelerate(vae))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_decode_and_encode(changes, randomise):
    vae = randomise(diffusers.AutoencoderKL(**VAE | changes))
    expected, found = both(vae, lambda vae: (vae.decode(Z), vae.encode(X)))
    assert [type(each) for each in found] == [type(each) for each in expected]
    close(found[0].sample, expected[0].sample)
    theirs, ours = expected[1].latent_dist, found[1].latent_dist
    assert type(ours) is type(theirs)
    close(ours.mode(), theirs.mode())
    close(ours.logvar, theirs.logvar)
    with pytest.raises(fastdiff.InputError, match="inference only"):
        vae.decode(Z.clone().requires_grad_())


@torch.no_grad()
def test_plain_tuples_and_forward(vae):
    def call(vae):
        generator = torch.Generator().manual_seed(5)
        sampled = vae(X, sample_posterior=True, generator=generator).sample
        return vae.decode(Z, return_dict=False)[0], vae.encode(X, False)[0].mean, vae(X, return_dict=False)[0], sampled

    for theirs, ours in zip(*both(vae, call), strict=True):
        close(ours, theirs)


def test_slices(vae):
    """diffusers' own slicing calls our `_decode` with one picture at a time."""
    seen = []
    vae.enable_slicing()
    expected, found = both(vae, lambda vae: vae.decode(Z).sample)
    close(found, expected)
    replacement = vae._decode.__self__
    vae._decode = lambda z: seen.append(len(z)) or replacement._decode(z)
    vae.decode(Z)
    vae.disable_slicing()
    vae.decode(Z)
    assert seen == [1, 1, 1, 3]


@pytest.mark.parametrize("when", ["before", "after"])
def test_tiles_of_any_size(vae, when):
    large_z, large_x = Z.repeat(1, 1, 2, 3), X.repeat(1, 1, 2, 3)
    whole, _ = both(vae, lambda vae: vae.decode(large_z).sample)
    fastdiff.restore(vae)

    def tile():
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = 24, 12, 0.5

    if when == "before":
        tile()
    else:
        fastdiff.accelerate(vae)
        tile()
        fastdiff.restore(vae)
    expected, found = both(vae, lambda vae: (vae.decode(large_z).sample, vae.encode(large_x).latent_dist.parameters))
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    assert (found[0] - whole).abs().max() > 1e-2  # tiling changes the output
    vae.disable_tiling()
    close(vae.decode(large_z).sample, whole)


def test_a_tiling_that_comes_while_accelerated(vae):
    fastdiff.accelerate(vae)
    whole = vae.decode(Z.repeat(1, 1, 2, 2)).sample
    vae.enable_tiling()
    assert not torch.allclose(vae.decode(Z.repeat(1, 1, 2, 2)).sample, whole, atol=1e-2)


def test_names_values_and_restore(vae):
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    expected, _ = both(vae, lambda vae: vae.decode(Z).sample)
    assert list(vae.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vae.state_dict().items())
    with torch.no_grad():
        assert torch.equal(fastdiff.restore(vae).decode(Z).sample, expected)
    with pytest.raises(fastdiff.InputError, match="not accelerated"):
        fastdiff.restore(vae)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_vae_that_moves(vae, dtype):
    """The VAE moves to 16 bits and back. With force_upcast, float16 is computed in float32."""
    expected, _ = both(vae, lambda vae: vae.decode(Z).sample)
    output = vae.to(dtype).decode(Z.to(dtype)).sample
    assert output.dtype == dtype
    assert (output - expected).norm() < 0.05 * expected.norm()
    close(vae.to(torch.float32).decode(Z).sample, vae.decode(Z).sample)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda vae: vae.decode(Z[:, :3]), r"^z: expected \(N, 4, H, W\)"),
        (lambda vae: vae.encode(X.long()), "^x: it is torch.int64"),
    ],
    ids=["channels", "dtype"],
)
def test_a_wrong_argument_is_named(vae, call, message):
    with pytest.raises(fastdiff.InputError, match=message):
        call(fastdiff.accelerate(vae))

"""ZImageTransformer2DModel against diffusers' in float32, on tiny models without zero weights."""

import diffusers
import pytest
import torch
from torch import Tensor, nn

from fastdiff import ZImageTransformer2DModel
from fastdiff.checkpoints.weights import load_weights

BASE = {
    "dim": 48,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 3,
    "n_kv_heads": 3,
    "in_channels": 4,
    "cap_feat_dim": 24,
    "axes_dims": (4, 6, 6),
    "axes_lens": (160, 32, 32),
}
CASES = {
    "plain": {},
    "one-layer": {"n_layers": 1, "n_refiner_layers": 1},
    "one-head": {"n_heads": 1, "axes_dims": (16, 16, 16)},
    "no-head-norms": {"qk_norm": False},
    "norm-eps": {"norm_eps": 0.1},
    "theta": {"rope_theta": 10_000.0},
    "t-scale": {"t_scale": 10.0},
    "key-value-heads-have-no-effect": {"n_kv_heads": 1},
    "wide-time": {"dim": 300, "n_heads": 3, "axes_dims": (40, 30, 30), "n_layers": 1, "n_refiner_layers": 1},
    "another-patch": {"all_patch_size": (4,), "all_f_patch_size": (2,)},
    "two-patches": {"all_patch_size": (2, 4), "all_f_patch_size": (1, 2)},
}
# captions of different lengths, also of one padded length and with no padding; sizes that are not square
CALLS = {
    "one": ([(8, 12)], [5]),
    "whole-padding": ([(8, 16)], [32]),
    "equal-sizes": ([(8, 12), (8, 12), (8, 12)], [5, 40, 9]),
    "different-sizes": ([(8, 12), (4, 20), (16, 8), (8, 12)], [33, 2, 64, 40]),
}


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for own, expected in zip(ours, theirs, strict=True):
        assert own.shape == expected.shape
        error = (own - expected).abs().max().item()
        assert error <= 1e-4
        assert error <= 2e-5 * expected.abs().max().item()


@pytest.fixture
def pair(randomise):
    """Build diffusers' model with some options, and ours with the same weights."""

    def build(**options) -> tuple[nn.Module, ZImageTransformer2DModel]:
        theirs = randomise(diffusers.ZImageTransformer2DModel(**BASE | options))
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.data += 1
        with torch.device("meta"):
            ours = ZImageTransformer2DModel.from_config(theirs.config)
        load_weights(ours, theirs.state_dict(), source="model", dtype=torch.float32, device="cpu")
        return theirs, ours

    return build


def inputs(call: str, frames: int = 1) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return random latents, times and captions."""
    generator = torch.Generator().manual_seed(len(call))
    sizes, lengths = CALLS[call]
    latents = [torch.randn(BASE["in_channels"], frames, *size, generator=generator) for size in sizes]
    captions = [torch.randn(length, BASE["cap_feat_dim"], generator=generator) for length in lengths]
    return latents, torch.rand(len(sizes), generator=generator), captions


@pytest.mark.parametrize("case", CASES)
def test_option(case, pair):
    theirs, ours = pair(**CASES[case])
    side, frames = ours.config.patches[-1]
    given = inputs("different-sizes", 2 * frames)
    with torch.no_grad():
        expected = theirs(*given, patch_size=side, f_patch_size=frames).sample
    assert_close(ours(*given, patch_size=side, f_patch_size=frames).sample, expected)


@pytest.mark.parametrize("call", CALLS)
def test_call(call, pair):
    theirs, ours = pair()
    latents, times, captions = inputs(call)
    with torch.no_grad():
        expected = theirs(latents, times, captions, return_dict=False)[0]
    for _ in range(3):  # run, recorded, replayed
        assert_close(ours(latents, times, captions, return_dict=False)[0], expected)


def test_one_time_for_all(pair):
    theirs, ours = pair()
    latents, _, captions = inputs("equal-sizes")
    with torch.no_grad():
        expected = theirs(latents, torch.tensor([0.25]), captions).sample
    assert_close(ours(latents, torch.tensor([0.25]), captions).sample, expected)


def test_padding_is_attended(pair):
    """The learned tokens of the padding count, of the picture and of the caption."""
    theirs, ours = pair()
    given = inputs("one")
    before = ours(*given).sample
    for name in ("x_pad_token", "cap_pad_token"):
        for model in (theirs, ours):
            getattr(model, name).data += 0.5
        ours.release_graphs()
        after = ours(*given).sample
        assert (after[0] - before[0]).abs().max() > 1e-3
        with torch.no_grad():
            assert_close(after, theirs(*given).sample)
        before = after


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_errors_in_16_bits_are_like_diffusers(dtype, pair):
    theirs, ours = pair()
    latents, times, captions = inputs("different-sizes")
    rounded = [each.to(dtype) for each in latents], times, [each.to(dtype) for each in captions]
    exact = [each.float() for each in rounded[0]], times, [each.float() for each in rounded[2]]
    for model in (theirs, ours):
        model.to(dtype)
    truth = ZImageTransformer2DModel.from_config(ours.config)
    load_weights(truth, theirs.float().state_dict(), source="model", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        peers, expected = theirs.to(dtype)(*rounded).sample, truth(*exact).sample
    for own, peer, true in zip(ours(*rounded).sample, peers, expected, strict=True):
        assert own.dtype == dtype
        error, allowed = ((each.float() - true).norm() for each in (own, peer))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * true.norm()

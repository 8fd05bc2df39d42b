"""The noise of the denoise step: Philox compared with Random123 and Triton, and the normal distribution."""

import math

import pytest
import torch

from fastdiff.kernels.device.language import tl, triton
from fastdiff.kernels.host.philox import _box_muller, philox4x32, philox_normal

# Random123's kat_vectors, philox4x32 with 10 rounds
KNOWN_ANSWERS = {
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    words = [[torch.tensor([int(word, 16)]) for word in text.split()] for text in (counter, key)]
    assert [f"{int(word):08x}" for word in philox4x32(*words)] == answer.split()


@triton.jit(do_not_specialize=["seed", "step"])  # a 1 would become a constant, whose type cannot be converted
def words_kernel(out_ptr, seed, step, COUNT: tl.constexpr):
    c0 = tl.arange(0, COUNT).to(tl.uint32)
    words = tl.philox(seed, c0, c0 * 0 + step.to(tl.uint32), c0 * 0, c0 * 0)
    for i in tl.static_range(4):
        tl.store(out_ptr + 4 * tl.arange(0, COUNT) + i, words[i].to(tl.int64))


def test_philox_has_tritons_integers(device, runs_triton):
    if not runs_triton:
        pytest.skip("no kernel runs here")
    zero = torch.zeros(1, dtype=torch.int64)
    for seed, step in [(0, 0), (7, 1), (2**32 - 1, 999), (2**32, 3), (2**62 + 12345, 2**31 - 1), (-1, 5)]:
        answer = torch.full((256, 4), -1, dtype=torch.int64, device=device)
        words_kernel[(1,)](answer, seed, step, COUNT=256)
        key = torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32 & 0xFFFFFFFF])
        words = philox4x32((torch.arange(256), zero + step, zero, zero), key)
        assert torch.stack(words, dim=1).tolist() == answer.tolist()


def test_noise_of_known_words():
    """Seed 0, step 0: the words of the known answer, transformed by the Box-Muller formula."""
    uniform = [(int(word, 16) + 0.5) / 2**32 for word in KNOWN_ANSWERS["zeros"][2].split()]
    expected = []
    for u, v in (uniform[:2], uniform[2:]):
        radius = math.sqrt(-2 * math.log(u))
        expected += [radius * math.cos(2 * math.pi * v), radius * math.sin(2 * math.pi * v)]
    noise = philox_normal(torch.zeros(1, dtype=torch.int64), 0, (2, 2, 1))
    torch.testing.assert_close(noise.flatten(), torch.tensor(expected), rtol=0, atol=1e-6)


def test_noise_is_unit_normal():
    noise = philox_normal(torch.arange(16), 3, (128, 128, 3)).double().flatten(1)
    count = noise.numel()
    assert noise.isfinite().all()
    assert abs(noise.mean()) < 5 / math.sqrt(count)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((noise**3).mean()) < 5 * math.sqrt(15 / count)
    assert abs((noise**4).mean() - 3) < 5 * math.sqrt(96 / count)
    for width, share in ((1, 0.682689), (2, 0.954500), (3, 0.997300)):
        assert abs((noise.abs() < width).double().mean() - share) < 5 * math.sqrt(share * (1 - share) / count)
    for lag in range(1, 5):  # the four words of a counter, and the next counter's
        assert abs((noise[:, lag:] * noise[:, :-lag]).mean()) < 5 / math.sqrt(count)
        assert abs((noise[:, lag:] ** 2 * noise[:, :-lag] ** 2).mean() - 1) < 5 * math.sqrt(8 / count)


def test_steps_and_seeds_do_not_correlate():
    seeds = torch.tensor([0, 1, 2, 2**32 - 1, 2**32, 2**40])
    noise = torch.cat([philox_normal(seeds, step, (64, 64, 3)) for step in range(4)]).flatten(1)
    correlation = torch.corrcoef(noise) - torch.eye(len(noise))
    assert correlation.abs().max() < 5 / math.sqrt(noise.shape[1])


@pytest.mark.parametrize("shape", [(64, 64, 3), (5, 7, 3), (1, 1, 1)], ids=["emoji", "odd", "smallest"])
def test_noise_depends_on_the_seed_alone_not_on_the_batch(shape):
    seeds = torch.tensor([11, 5, 2**32 - 1, 5, 0, 2**63 - 1])
    together = philox_normal(seeds, 9, shape)
    assert together.shape == (6, *shape)
    assert together.dtype == torch.float32
    for i, seed in enumerate(seeds):
        assert torch.equal(philox_normal(seed[None], 9, shape)[0], together[i])
    assert torch.equal(together[1], together[3])


def test_noise_counts_elements_through_the_picture():
    seed = torch.tensor([42])
    long, short = philox_normal(seed, 1, (100,)), philox_normal(seed, 1, (3, 3, 3))
    assert torch.equal(long[:, :27], short.flatten(1))


def test_step_on_the_device_is_the_step():
    seed = torch.tensor([42])
    assert torch.equal(philox_normal(seed, torch.tensor([6]), (4, 4, 3)), philox_normal(seed, 6, (4, 4, 3)))


def test_the_extreme_words_give_finite_noise():
    extremes = _box_muller(torch.tensor([[0, 0, 2**32 - 1, 2**32 - 1]]))
    assert extremes.isfinite().all()
    assert extremes[0, 0] == pytest.approx(math.sqrt(2 * 33 * math.log(2)))
    assert extremes[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize("seeds", [torch.tensor(1), torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32)])
def test_seeds_of_another_kind_are_refused(seeds):
    with pytest.raises(ValueError, match="seeds are"):
        philox_normal(seeds, 0, (4,))

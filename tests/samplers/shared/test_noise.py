"""Noise: golden values, which fail on a change of bits, and which generator draws it."""

import hashlib

import pytest
import torch

from fastdiff.errors import InputError
from fastdiff.kernels.denoise import philox_normal
from fastdiff.samplers.shared.noise import Noise, randn_tensor

CPU = torch.device("cpu")
SEEDS = (0, 7, 2**32 - 1)
PHILOX = (  # the first four elements of each seed's noise at step 5
    (-0.5977743, 1.195893, 1.3949869, 0.61226),
    (2.287772, 0.9120314, -1.3560644, 2.613606),
    (0.30597812, 1.298697, 0.30043164, -2.0598595),
)
TINY = (  # the first four of (2, 2, 3); torch draws fewer than 16 elements one by one, the same on every CPU
    (1.5409961, -1.0845224, -0.7192576, -0.2934289),
    (-0.1467951, 1.6907902, 0.13817266, 0.7861413),
    (1.219763, -0.0755102, -0.26449686, -0.39297947),
)
LARGER = (  # the first four of (8, 8, 3)
    (-1.1258398, -0.5692481, -0.88337576, -1.1523602),
    (-0.8201345, 0.1332398, 0.5688964, 0.39563116),
    (-2.6642976, -0.16030806, -0.5689878, -1.0910486),
)


def make(shape=(3, 2, 2), generator=None, dtype=torch.float32):
    return Noise(SEEDS, shape, generator, CPU, dtype)


def test_philox_noise_of_a_step():
    """Integers, then logarithm, root, sine and cosine in float64, give the same bits on every machine."""
    noise = philox_normal(torch.tensor(SEEDS), 5, (8, 8, 3))
    assert torch.equal(noise.flatten(1)[:, :4], torch.tensor(PHILOX))
    assert hashlib.sha256(noise.numpy().tobytes()).hexdigest()[:16] == "cb41a51bbb46241a"


def test_starting_noise_of_seeds():
    assert torch.equal(make().start().flatten(1)[:, :4], torch.tensor(TINY))
    larger = make(shape=(3, 8, 8)).start()
    assert (larger.shape, larger.dtype) == ((3, 8, 8, 3), torch.float32)
    # torch's vectorized logarithm and cosine differ in the last bits between CPUs
    torch.testing.assert_close(larger.flatten(1)[:, :4], torch.tensor(LARGER), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_starting_noise_of_a_generator_is_diffusers(dtype):
    """One draw makes the batch in the model's dtype. The steps' noise follows in the same stream."""
    noise = make(generator=torch.Generator().manual_seed(3), dtype=dtype)
    theirs = torch.Generator().manual_seed(3)
    first, second = (torch.randn(3, 3, 2, 2, generator=theirs, dtype=dtype).permute(0, 2, 3, 1) for _ in range(2))
    assert torch.equal(noise.start(), first.float())
    assert torch.equal(noise.of_steps()(), second)


def test_steps_may_draw_in_another_dtype_than_the_start():
    noise = make(generator=torch.Generator().manual_seed(3), dtype=torch.bfloat16)
    expected = torch.randn(3, 3, 2, 2, generator=torch.Generator().manual_seed(3))
    drawn = noise.of_steps(torch.float32)()
    assert drawn.dtype == torch.float32 and torch.equal(drawn, expected.permute(0, 2, 3, 1))


def test_steps_of_seeds_draw_by_the_seeds():
    assert make().of_steps().tolist() == list(SEEDS)


def test_latents_replace_the_starting_noise_alone():
    latents = torch.randn(3, 3, 2, 2).half()
    noise = make(generator=torch.Generator().manual_seed(3))
    assert torch.equal(noise.start(latents), latents.float().permute(0, 2, 3, 1))
    expected = torch.randn(3, 3, 2, 2, generator=torch.Generator().manual_seed(3))
    assert torch.equal(noise.of_steps()(), expected.permute(0, 2, 3, 1))


def test_a_list_of_generators_draws_one_picture_each():
    drawn = randn_tensor((2, 3), [torch.Generator().manual_seed(seed) for seed in (4, 5)], CPU, torch.float32)
    for picture, seed in zip(drawn, (4, 5), strict=True):
        assert torch.equal(picture, torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))[0])


def test_a_list_of_another_length_is_refused():
    with pytest.raises(InputError, match="2 generators for 3 pictures; give one for each"):
        make(generator=[torch.Generator(), torch.Generator()]).start()

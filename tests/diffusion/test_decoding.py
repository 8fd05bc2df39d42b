"""Convert tensors to pictures."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from fastdiff.diffusion import decoding
from fastdiff.diffusion.decoding import OutputType, decode, join
from fastdiff.errors import NonFiniteError

X = torch.tensor([-2.0, -1.0, 0.0, 1.0]).reshape(1, 2, 2, 1)


def test_values_are_clamped_and_scaled():
    assert decode(X, "pt").tolist() == [[[[0, 0], [0.5, 1]]]]
    np.testing.assert_array_equal(decode(X, "np"), decode(X, "pt").permute(0, 2, 3, 1))


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_levels_of_an_image(channels, mode):
    (image,) = decode(X.expand(1, 2, 2, channels), "pil")
    assert (image.mode, image.size) == (mode, (2, 2))
    assert np.asarray(image).reshape(4, -1)[:, 0].tolist() == [0, 0, 128, 255]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_an_error(value):
    with pytest.raises(NonFiniteError, match="try --dtype float32"):
        decode(X.clone().fill_(value), "pil")


def test_nan_of_a_vae_is_its_own(monkeypatch):
    monkeypatch.setattr(decoding, "decode_latents", lambda vae, x: x * float("nan"))
    with pytest.raises(NonFiniteError, match="the VAE's output is NaN"):
        decode(X, "pil", SimpleNamespace())


@pytest.mark.parametrize("output_type", get_args(OutputType))
@pytest.mark.parametrize("sizes", [(4,), (2, 1, 1)], ids=["whole", "parts"])
def test_parts_are_joined_as_if_they_were_one(output_type, sizes):
    x = torch.rand(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    found, expected = join([decode(part, output_type) for part in x.split(sizes)], output_type), decode(x, output_type)
    assert type(found) is type(expected) and len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))

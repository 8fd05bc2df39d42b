"""Tensors as pictures."""

import numpy as np
import pytest
import torch

from fastdiff.diffusion.decoding import decode
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

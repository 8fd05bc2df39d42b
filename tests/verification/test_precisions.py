"""The two errors that `fastdiff verify --precision` reports: predictions in per cent, and pictures in dB."""

import math

import numpy as np
import pytest
import torch

from fastdiff.verification.precisions import _ratio, _relative


def test_the_error_of_a_prediction_is_relative_to_its_size():
    truth = torch.tensor([30.0, -40.0])
    assert _relative(1.1 * truth, truth) == pytest.approx(10, rel=1e-6)
    assert _relative(truth, truth) == 0


def test_the_ratio_of_pictures_is_that_of_the_peak_to_the_error():
    picture = np.array([0, 100, 200], np.uint8)
    assert _ratio(picture + np.uint8(1), picture) == pytest.approx(20 * math.log10(255))
    assert _ratio(picture, picture) == math.inf
    trajectory = np.array([-1.0, 3.0], np.float32)
    assert _ratio(trajectory + np.float32(0.5), trajectory) == pytest.approx(20 * math.log10(4 / 0.5))

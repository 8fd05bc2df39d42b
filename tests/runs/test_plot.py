"""Line plots of trajectories: the lines match the numbers."""

import numpy as np
import pytest

from fastdiff.runs import plot
from fastdiff.runs.plot import HEIGHT, WIDTH, draw_lines


def columns_of(image, colour) -> dict[int, float]:
    """Return the mean height of a line's pixels in each column that has any, left of the legend."""
    pixels = np.asarray(image, dtype=int)[:, : plot._BOX[2]]
    rows, columns = np.nonzero((abs(pixels - colour) < 40).all(axis=2))
    return {int(column): float(rows[columns == column].mean()) for column in np.unique(columns)}


def test_a_line_for_each_channel_goes_through_its_numbers():
    trajectory = np.array([[0, 1, 2, 3, 4], [6, 6, 6, 6, 6], [-1, -4, -1, -4, -1]], dtype=np.float32)
    image = draw_lines(trajectory)
    assert (image.size, image.mode) == ((WIDTH, HEIGHT), "RGB")
    rising, level, jagged = (columns_of(image, plot._colour(channel, 3)) for channel in range(3))
    left, right = min(rising), max(rising)
    assert (left, right) == pytest.approx((plot._BOX[0] + 8, plot._BOX[2] - 8), abs=2)
    assert rising[left + 3] > rising[(left + right) // 2] > rising[right - 3], "larger values are higher"
    assert np.ptp(list(level.values())) <= 1
    quarter = left + (right - left) // 4
    assert jagged[quarter] == pytest.approx(max(jagged.values()), abs=4), "the lowest value is at position 1"
    slope = (rising[right - 3] - rising[left + 3]) / (right - left - 6)
    assert rising[quarter] == pytest.approx(rising[left + 3] + slope * (quarter - left - 3), abs=1.5), "it is straight"


@pytest.mark.parametrize(
    "trajectory",
    [
        pytest.param(np.zeros((1, 1)), id="one-zero"),
        pytest.param(np.full((2, 5), 3.7), id="constant"),
        pytest.param(np.linspace(-1, 1, 60 * 8).reshape(60, 8), id="more-channels-than-the-legend-holds"),
        pytest.param(np.array([[-3e38, 3e38]]), id="largest"),
        pytest.param(np.array([[0, 1e-45]]), id="smallest"),
        pytest.param(np.array([[1, 1 + 1.2e-7]]), id="neighbours"),
        pytest.param(np.random.default_rng(0).normal(size=(2, 65536)), id="longest"),
    ],
)
def test_any_finite_trajectory_is_drawn(trajectory):
    image = draw_lines(trajectory.astype(np.float32))
    assert image.size == (WIDTH, HEIGHT)
    assert columns_of(image, plot._colour(len(trajectory) - 1, len(trajectory))), "the last channel's line"


@pytest.mark.parametrize(
    ("low", "high", "least", "expected"),
    [
        (0, 31, 1, [0, 5, 10, 15, 20, 25, 30]),
        (0, 3, 1, [0, 1, 2, 3]),
        (-1.02, 1.02, 0, [-1, -0.5, 0, 0.5, 1]),
        (0.5, 103, 0, [20, 40, 60, 80, 100]),
    ],
)
def test_ticks_are_round_numbers(low, high, least, expected):
    assert plot._ticks(low, high, least) == pytest.approx(expected)

"""Canny edges: hand-made pictures, and maps of OpenCV for pictures that it saw once."""

import numpy as np
import pytest
from PIL import Image

from fastdiff.edges import canny, canny_picture
from fastdiff.errors import InputError


def grey(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.uint8)[..., None]


def step(height: int = 8, width: int = 9, at: int = 4, level: int = 255) -> np.ndarray:
    """A picture that is black left of a column and `level` from it on."""
    pixels = np.zeros((height, width, 1), np.uint8)
    pixels[:, at:] = level
    return pixels


def test_a_step_is_one_pixel_wide():
    edges = canny(step())
    assert edges.sum(axis=1).tolist() == [1] * 8
    assert edges[:, 3].all(), "of two equal gradients, the left one"


def test_a_step_of_rows_is_one_pixel_wide():
    edges = canny(step().transpose(1, 0, 2))
    assert edges.sum(axis=0).tolist() == [1] * 8 and edges[3].all()


def test_diagonals_are_chains_of_pixels_in_both_directions():
    falling = np.triu(np.ones((12, 12), np.uint8), 0)[..., None] * 255
    for pixels in (falling, falling[:, ::-1]):
        rows, columns = np.nonzero(canny(pixels))
        assert len(rows) >= 10
        assert np.ptp(np.abs(columns - (rows if pixels is falling else 11 - rows))) <= 1
        assert canny(pixels).sum(axis=1).max() <= 2


def test_a_flat_picture_has_no_edges():
    assert not canny(np.full((5, 5, 3), 77, np.uint8)).any()


@pytest.mark.parametrize(("level", "is_edge"), [(25, False), (50, False), (51, True)])
def test_an_edge_alone_must_be_above_the_high_threshold(level, is_edge):
    """Sobel's dx at a step is four times its height."""
    assert canny(step(level=level), 100, 200).any() == is_edge


def test_a_weak_edge_survives_next_to_a_strong_one():
    pixels = step(height=40, level=30)
    pixels[30:, 4:] = 80
    edges = canny(pixels)
    assert edges[:28, 3].all(), "the chain of weak pixels reaches to the top"
    pixels[28:30] = 0  # cuts it
    edges = canny(pixels)
    assert not edges[:26].any() and edges[33:, 3].all()


def test_a_picture_of_a_batch_does_not_touch_another():
    weak, strong = step(level=30), step(level=255)
    both = canny(np.stack([weak, strong, weak]))
    assert not both[0].any() and not both[2].any()
    assert np.array_equal(both[1], canny(strong))


def test_the_channel_with_the_largest_gradient_counts():
    blue = np.zeros((8, 9, 3), np.uint8)
    blue[:, 4:, 2] = 255
    assert np.array_equal(canny(blue), canny(step()))


OPENCV = {  # seed of smooth noise -> edge pixels of each row, from cv2.Canny(pixels, 100, 200) of OpenCV 5.0
    0: [
        286331152, 286331152, 286331137, 4158609407, 286331152, 286331154, 269685009, 4127127287, 286265619,
        286331154, 959975696, 4008706015, 152109329, 286327058, 286326833, 3791551969, 285282576, 286331152,
        16847120, 4277141489, 51904529, 286331154, 4250361822, 54145064,
    ],
}  # fmt: skip


def smooth_noise(seed: int) -> np.ndarray:
    """A colour picture (24, 32, 3) with soft and hard edges in all directions."""
    noise = np.random.RandomState(seed).randint(0, 256, (8, 11, 3)).astype(np.int64)
    large = noise.repeat(4, axis=0).repeat(4, axis=1)
    soft = (large[:-1, :-1] + large[1:, :-1] + large[:-1, 1:] + large[1:, 1:]) // 4
    return soft[:24, :32].astype(np.uint8)


@pytest.mark.parametrize("seed", OPENCV)
def test_the_map_is_that_of_opencv(seed):
    rows = [int("".join("01"[int(edge)] for edge in row), 2) for row in canny(smooth_noise(seed))]
    assert rows == OPENCV[seed]


def test_a_control_picture_is_white_on_black():
    image = Image.fromarray(step()[..., 0])
    drawn = canny_picture(image)
    assert drawn.mode == "RGB" and drawn.size == image.size
    pixels = np.asarray(drawn)
    assert set(pixels.ravel().tolist()) == {0, 255}
    assert np.array_equal(pixels[..., 0] == 255, canny(step()))
    assert (pixels == pixels[..., :1]).all()


@pytest.mark.parametrize(("low", "high"), [(200, 100), (-1, 100)])
def test_thresholds_in_disorder_are_an_error(low, high):
    with pytest.raises(InputError, match="low <= high"):
        canny(step(), low, high)

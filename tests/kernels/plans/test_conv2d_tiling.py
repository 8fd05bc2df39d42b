"""Tilings of convolutions: what holds for every batch."""

from dataclasses import replace
from itertools import product

import pytest

from fastdiff.kernels.plans import conv2d_tiling
from fastdiff.kernels.plans.conv2d_problem import Problem
from fastdiff.kernels.plans.conv2d_tiles import M_SIDE
from fastdiff.kernels.plans.conv2d_tiling import alternatives, make_tiling


@pytest.mark.parametrize("length", [4, 12, 16, 32, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_row_is_normalised_where_it_is_made_in_any_batch(length, itemsize):
    for pictures, channels, out_channels in product((1, 64, 1024), (14, 32, 256), (32, 64, 512)):
        sizes = (1, length, (channels,), out_channels, (1, 5), 1, (2, 2, 0, 0), False, itemsize, out_channels // 8)
        problem = Problem(pictures, *sizes)
        tiling = make_tiling(problem, obstacle=None, multiprocessors=132)
        assert tiling.normalises(problem) and tiling.tile.channels % problem.group == 0, tiling
        assert tiling.tile.pixels % tiling.moments == 0 and tiling.moments >= length, tiling


def square(pictures: int, side: int, channels: int, *, group: int = 0) -> Problem:
    """Return the sizes of a 3x3 convolution in bfloat16."""
    return Problem(pictures, side, side, (channels,), channels, (3, 3), 1, (1, 1, 1, 1), False, 2, group)


@pytest.mark.parametrize("group", [0, 8, 64], ids=["no-norm", "groups-of-8", "groups-of-64"])
@pytest.mark.parametrize("side", [4, 6, 8, 16, 32])
def test_candidates_keep_what_orders_a_sum_and_hoppers_instructions(side, group):
    for pictures, channels in product((1, 64), (64, 256, 1280)):
        problem = square(pictures, side, channels, group=group)
        tiling = make_tiling(problem, obstacle=None, multiprocessors=132)
        for candidate in alternatives(tiling, problem):
            other = tiling.with_candidate(candidate)
            tile = other.tile
            assert (other.moments, other.chunks) == (tiling.moments, tiling.chunks)
            assert other.steps * tile.block == tiling.steps * tiling.tile.block
            assert tile.pixels % tiling.moments == 0 and channels % tile.block == 0
            assert (tile.channels if tile.swap else tile.pixels) >= M_SIDE, candidate
            if group and tiling.normalises(problem):
                assert tile.pixels >= side**2 and tile.channels >= group


@pytest.mark.parametrize("moments", [16, 32, 64])
def test_smaller_tiles_of_moments_leave_whole_pictures_to_a_norm_in_the_convolution(moments, monkeypatch):
    monkeypatch.setattr(conv2d_tiling, "SMALL_MOMENTS", moments)
    for pictures in (1, 64):
        normed, plain = (square(pictures, 8, 256, group=group) for group in (8, 0))
        tiling = make_tiling(normed, obstacle=None, multiprocessors=132)
        assert tiling.normalises(normed) and tiling.tile.pixels >= 64 and tiling.moments == moments
        assert min(candidate.pixels for candidate in alternatives(tiling, normed)) == 64
        assert min(candidate.pixels for candidate in alternatives(tiling, plain)) == moments


CHUNKS = [
    (4, (128,), 1), (4, (192,), 2), (4, (256,), 3), (4, (256, 256), 3),
    (8, (256,), 1), (8, (256, 256), 3), (8, (512,), 6), (8, (1280,), 6), (8, (1280, 1280), 6),
    (16, (512,), 1), (16, (1280,), 6), (16, (1280, 1280), 1),
]  # fmt: skip


@pytest.mark.parametrize(("side", "channels", "chunks"), CHUNKS)
def test_chunks_follow_from_the_picture_alone(side, channels, chunks):
    for pictures in (1, 2, 8, 64, 512):
        problem = replace(square(pictures, side, 256), channels=channels)
        tiling = make_tiling(problem, obstacle=None, multiprocessors=132)
        assert tiling.chunks == chunks, tiling
        assert tiling.apart == (channels == (1280,)) and (chunks > 1 or not tiling.spread)


def test_groups_that_no_program_has_whole_are_normalised_by_another_kernel():
    row = 64, 1, 16, (384,), 384, (1, 5), 1, (2, 2, 0, 0), False, 2
    for group in (8, 24, 32, 64, 96, 128):
        for problem in (Problem(*row, group), square(64, 8, 384, group=group)):
            tiling = make_tiling(problem, obstacle=None, multiprocessors=132)
            assert tiling.normalises(problem) == (group in (8, 32, 64)), problem


@pytest.mark.parametrize("side", [4, 7, 8, 16, 32, 64])
@pytest.mark.parametrize("channels", [36, 64, 320, 1280])
def test_in_fp8_a_step_is_as_long_in_any_batch(side, channels):
    """A step's sum is computed separately before it is added, so a step's length affects the bits."""
    for height in (side, 1):
        sizes = height, side, (channels,), channels, (min(3, height), 3), 1, (1, 1, height > 1, height > 1), False, 2
        tilings = [
            make_tiling(Problem(pictures, *sizes, fp8=True), obstacle=None, multiprocessors=132)
            for pictures in (1, 3, 8, 64, 1024)
        ]
        assert len({tiling.tile.block for tiling in tilings}) == 1
        assert len({(tiling.moments, tiling.chunks, tiling.steps, tiling.flat) for tiling in tilings}) == 1


@pytest.mark.parametrize("mode", [(1, False), (2, False), (1, True)], ids=["same", "down", "up"])
@pytest.mark.parametrize("height", [2, 4, 6, 8, 12, 24, 48, 96, 100, 128, 256])
def test_a_tile_is_whole_tiles_of_moments_in_any_batch(mode, height):
    for pictures, channels, out_channels, itemsize in product((1, 8, 64), (3, 64, 256), (3, 16, 64, 96, 256), (2, 4)):
        stride, upsample = mode
        sizes = ((channels,), out_channels, (3, 3), stride, (1, 1, 1, 1), upsample, itemsize)
        tiling = make_tiling(Problem(pictures, height, height, *sizes), obstacle=None, multiprocessors=132)
        assert tiling.tile.pixels % tiling.moments == 0, (pictures, channels, out_channels, tiling)

"""Fixtures of all samplers' tests: columns by name, and a model that makes no mistake."""

import math

import pytest
import torch

from fastdiff.kernels.denoise import COLUMNS


@pytest.fixture
def column():
    """A column of a schedule's rows by its name, (steps,) float64."""
    return lambda schedule, name: schedule.rows[:, COLUMNS.index(name)].double()


@pytest.fixture
def golden_columns():
    """The rows of a schedule in the nine columns that DDPM and DDIM use, whatever others there are."""
    names = ["x0_x", "x0_m", "x0_div", "prev_x0", "prev_x", "prev_m", "sigma", "log_variance_min", "log_variance_max"]
    return lambda schedule: schedule.rows[:, [COLUMNS.index(name) for name in names]].contiguous()


@pytest.fixture
def forward_process():
    def forward_process(prediction, alpha_bar, seed=0):
        """x_0 in [-1, 1], its noise, x_t, and what a perfect model says of x_t; (1, 8, 8, 3) float64."""
        generator = torch.Generator().manual_seed(seed)
        x_0 = torch.rand((1, 8, 8, 3), generator=generator, dtype=torch.float64) * 2 - 1
        eps = torch.randn((1, 8, 8, 3), generator=generator, dtype=torch.float64)
        signal, noise = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
        output = {"epsilon": eps, "sample": x_0, "v_prediction": signal * eps - noise * x_0}[prediction]
        return x_0, eps, signal * x_0 + noise * eps, output

    return forward_process

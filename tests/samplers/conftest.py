"""Fixtures for the samplers' tests: columns by name, and a perfect model."""

import math

import pytest
import torch

from fastdiff.kernels.denoise import COLUMNS


@pytest.fixture
def column():
    """Return a column of a schedule's rows by name, (steps,) float64."""
    return lambda schedule, name: schedule.rows[:, COLUMNS.index(name)].double()


@pytest.fixture
def golden_columns():
    """Return a schedule's rows in the nine columns that DDPM and DDIM use."""
    names = ["x0_x", "x0_m", "x0_div", "prev_x0", "prev_x", "prev_m", "sigma", "log_variance_min", "log_variance_max"]
    return lambda schedule: schedule.rows[:, [COLUMNS.index(name) for name in names]].contiguous()


@pytest.fixture
def forward_process():
    def forward_process(prediction, alpha_bar, seed=0):
        """Return x_0 in [-1, 1], its noise, x_t, and a perfect model's output for x_t, all (1, 8, 8, 3) float64."""
        generator = torch.Generator().manual_seed(seed)
        x_0 = torch.rand((1, 8, 8, 3), generator=generator, dtype=torch.float64) * 2 - 1
        eps = torch.randn((1, 8, 8, 3), generator=generator, dtype=torch.float64)
        signal, noise = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
        output = {"epsilon": eps, "sample": x_0, "v_prediction": signal * eps - noise * x_0}[prediction]
        return x_0, eps, signal * x_0 + noise * eps, output

    return forward_process

"""DEIS over outputs with known integrals. Order k is exact where eps is a polynomial of degree k - 1 in log(rho)."""

import math

import pytest
import torch

from fastdiff.kernels.denoise import COLUMNS, EARLIER, StepOptions, denoise_step
from fastdiff.samplers.deis import DEISConfig, deis_rows
from fastdiff.samplers.shared.flow import noise_ratios, signal_and_noise

SIGMAS = {False: torch.tensor([9.0, 5.0, 4.5, 2.0, 0.7, 0.5]), True: torch.tensor([0.9, 0.8, 0.7, 0.4, 0.2, 0.1])}


@pytest.mark.parametrize("flow", [False, True], ids=["variance-preserving", "flow"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_deis_of_an_order_integrates_polynomials_below_it(order, flow):
    config = DEISConfig(solver_order=order, lower_order_final=False, use_flow_sigmas=flow)
    rhos = noise_ratios(config, SIGMAS[flow])
    x, changes = torch.zeros((1, 2, 2, 3), dtype=torch.float64), []
    earlier = torch.zeros((1, EARLIER, 2, 2, 3), dtype=torch.float64)
    rows = deis_rows(config, SIGMAS[flow])
    rows[:, COLUMNS.index("keeps_output")] = 1
    for i, row in enumerate(rows):
        output = torch.full_like(x, math.log(rhos[i]) ** (order - 1))
        before = x / signal_and_noise(config, rhos[i])[0]
        x, _, earlier = denoise_step(output, x, row, StepOptions(), earlier=earlier)
        changes.append((x / signal_and_noise(config, rhos[i + 1])[0] - before).mean().item())
    integral = {1: lambda r: r, 2: lambda r: r * (math.log(r) - 1), 3: lambda r: r * ((math.log(r) - 1) ** 2 + 1)}
    for i in range(order - 1, len(changes)):  # earlier steps know fewer outputs
        assert changes[i] == pytest.approx(integral[order](rhos[i + 1]) - integral[order](rhos[i]), rel=1e-5, abs=1e-5)

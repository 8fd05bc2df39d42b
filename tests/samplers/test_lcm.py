"""LCM's rows: the boundary condition, and the steps' targets."""

import pytest
import torch

from fastdiff import LCMScheduler
from fastdiff.kernels.denoise import COLUMNS
from fastdiff.samplers.lcm import LCMConfig, lcm_rows
from fastdiff.samplers.shared.betas import make_alpha_bar, make_betas


def test_the_picture_at_timestep_zero_is_the_sample():
    """Song et al. 2023, eq. 5: a consistency model does not change a picture without noise."""
    config = LCMConfig()
    rows = lcm_rows(config, make_alpha_bar(make_betas(config)), torch.tensor([0]), 0)
    values = dict(zip(COLUMNS, rows[0].tolist(), strict=True))
    assert (values["prev_x"], values["prev_x0"], values["sigma"]) == (1, 0, 0)


def test_all_steps_but_the_last_go_on_with_fresh_noise(column):
    """Luo et al. 2023, algorithm 3: picture and noise have the weights of the forward process."""
    lcm = LCMScheduler()
    schedule = lcm.schedule(4)
    alpha_bar = lcm.alphas_cumprod.double()[schedule.timesteps[1:]]
    assert schedule.timesteps.tolist() == [999, 759, 499, 259]
    assert schedule.draws_noise == (True, True, True, False)
    torch.testing.assert_close(column(schedule, "sigma")[:-1], (1 - alpha_bar).sqrt())
    torch.testing.assert_close(column(schedule, "prev_x0")[:-1], alpha_bar.sqrt(), rtol=1e-6, atol=1e-6)
    assert column(schedule, "prev_x0")[-1].item() == pytest.approx(1) and column(schedule, "sigma")[-1] == 0

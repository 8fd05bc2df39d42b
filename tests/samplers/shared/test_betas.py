"""Betas and alpha_bar: their properties and golden values."""

import hashlib

import numpy as np
import pytest
import torch

from fastdiff.samplers.ddim import DDIMConfig
from fastdiff.samplers.ddpm import DDPMConfig
from fastdiff.samplers.shared.betas import make_alpha_bar, make_betas


def test_zero_snr_leaves_no_signal_and_keeps_the_start():
    plain, rescaled = (
        make_alpha_bar(make_betas(DDIMConfig(rescale_betas_zero_snr=rescale))) for rescale in (False, True)
    )
    assert rescaled[-1] == 0
    assert rescaled[0].item() == pytest.approx(plain[0].item(), rel=1e-6)
    assert (rescaled[:-1].diff() < 0).all()


def test_trained_betas_replace_any_beta_schedule():
    betas = np.linspace(0.01, 0.3, 12)
    config = DDIMConfig(num_train_timesteps=12, beta_schedule="sigmoid", trained_betas=betas)
    assert torch.equal(make_betas(config), torch.tensor(betas, dtype=torch.float32))
    assert config == DDIMConfig(num_train_timesteps=12, beta_schedule="sigmoid", trained_betas=betas.tolist())
    assert hash(config)


# Values at timesteps 0, 1, 500, 998 and 999.
GOLDEN = {
    "linear": (
        [0.0001, 0.00011991992, 0.010059959, 0.01998008, 0.02],
        [0.9999, 0.99978006, 0.07779665, 4.1181942e-05, 4.0358304e-05],
    ),
    "scaled_linear": (
        [0.0001, 0.000102648366, 0.0057420726, 0.019962812, 0.020000001],
        [0.9999, 0.99979734, 0.33127463, 0.00074837956, 0.000733412],
    ),
    "squaredcos_cap_v2": (
        [4.1284224e-05, 4.614175e-05, 0.0031556915, 0.7499994, 0.999],
        [0.9999587, 0.99991256, 0.49228504, 2.4287663e-06, 2.428735e-09],
    ),
    "sigmoid": (
        [0.0001492052, 0.00014979832, 0.010079878, 0.0199502, 0.019950796],
        [0.9998508, 0.999701, 0.29888758, 4.0489624e-05, 3.968182e-05],
    ),
    "laplace": (
        [0.021153757, 0.008747813, 0.0002500314, 0.15162966, 0.8472526],
        [0.97884625, 0.9702835, 0.70728344, 0.2070266, 0.031622775],
    ),
}


@pytest.mark.parametrize("schedule", GOLDEN)
def test_betas_written_out(schedule):
    """torch's linspace uses FMA on CPUs that have it, which changes two ulps. The products accumulate them."""
    betas = make_betas(DDPMConfig(beta_schedule=schedule))
    at = torch.tensor([0, 1, 500, 998, 999])
    expected, expected_alpha_bar = (torch.tensor(values) for values in GOLDEN[schedule])
    torch.testing.assert_close(betas[at], expected, rtol=2**-22, atol=0)
    torch.testing.assert_close(make_alpha_bar(betas)[at], expected_alpha_bar, rtol=1e-6, atol=0)


EXACT = {  # betas, alpha_bar, betas rescaled to zero SNR
    "squaredcos_cap_v2": ("ee9cd3d5d1b98fa4", "f32ff0b43921c312", "b218075d52dd3c44"),
    "laplace": ("30df9a22d9f35769", "a2900ff0f2f8e0f6", "dad9a825667cf412"),
}


@pytest.mark.parametrize("schedule", EXACT)
def test_betas_that_are_the_same_on_every_machine(schedule, roots_of_ieee):
    """Betas are made in float64 and rounded as in IEEE 754, so a change of one bit in 1,000 betas fails here."""
    plain, rescaled = (
        make_betas(DDPMConfig(beta_schedule=schedule, rescale_betas_zero_snr=rescale)) for rescale in (False, True)
    )
    hashes = [
        hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for tensor in (plain, make_alpha_bar(plain), rescaled)
    ]
    assert tuple(hashes) == EXACT[schedule]

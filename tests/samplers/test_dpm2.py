"""DPM2 over a tangent with a known integral, and the noise levels of its ancestral form."""

import pytest
import torch

import fastdiff
from fastdiff.samplers.dpm2 import DPM2Config, DPM2Sigmas, dpm2_rows
from tests.samplers.tangents import pictures


def test_dpm2_integrates_a_constant():
    sigmas = DPM2Sigmas(*torch.tensor([[9.0, 4.0], [6.0, 0.0], [4.0, 0.0], [0.0, 0.0]]))  # 9 to 4 to 0, by way of 6
    found = pictures(dpm2_rows(DPM2Config(), sigmas), torch.tensor([9.0, 6.0, 4.0, 0.0]), degree=0)
    for picture, way in zip(found, (-3.0, -5.0, -9.0), strict=True):
        torch.testing.assert_close(picture, torch.full_like(picture, 0.3 * way), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("steps", [2, 5])
def test_ancestral_levels_where_float32_cancels(steps):
    """A cosine begins at sigma 20291. diffusers' sigma_down is NaN there."""
    ours = fastdiff.KDPM2AncestralDiscreteScheduler(beta_schedule="squaredcos_cap_v2")
    ours.set_timesteps(steps)
    levels, following = ours._levels, ours.sigmas[1::2][:steps]
    torch.testing.assert_close(levels.end[:1], following[:1] ** 2 / levels.start[:1])
    torch.testing.assert_close(levels.end**2 + levels.noise**2, following**2)
    torch.testing.assert_close(levels.middle[:-1] ** 2, (levels.start * levels.end)[:-1])
    assert ours.schedule(steps).rows.isfinite().all()

"""The bundled ControlNet against diffusers, with its trained weights in float32."""

import diffusers
import pytest
import torch

from fastdiff import ControlNetModel
from fastdiff.checkpoints import hub
from tests.parity.control.test_models import assert_same_residuals

FOLDER = hub.bundled_controlnets()["emoji-edges"]

pytestmark = pytest.mark.usefixtures("one_thread")


def test_diffusers_loads_the_folder_and_computes_the_same_residuals():
    theirs = diffusers.ControlNetModel.from_pretrained(FOLDER, torch_dtype=torch.float32).eval()
    ours = ControlNetModel.from_pretrained("emoji-edges")
    random = torch.Generator().manual_seed(0)
    edges = (torch.rand(2, 1, 128, 128, generator=random) < 0.05).float().expand(-1, 3, -1, -1)
    sample, text = (torch.randn(2, *shape, generator=random) for shape in ((4, 32, 32), (77, 160)))
    given = sample, torch.tensor([10, 900]), text, edges
    assert_same_residuals(theirs, ours, given, {})
    assert_same_residuals(theirs, ours, given, {"guess_mode": True, "conditioning_scale": 0.7})

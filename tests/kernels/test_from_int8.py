"""from_int8: every number is unchanged. Also which weights a kernel loads in 16 bits."""

import pytest
import torch

from fastdiff.kernels.from_int8 import BLOCK, as_loaded, from_int8
from fastdiff.kernels.plans import choices

SHAPES = {"all": (16, 16), "odd": (3, 7, 5), "several-programs": (3, BLOCK - 1), "one": (1,)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output(shape, dot_dtype, device, runs_triton):
    numbers = torch.arange(torch.Size(shape).numel(), device=device) % 256 - 128
    values = numbers.to(torch.int8).view(shape)
    y = (from_int8.kernel if runs_triton else from_int8)(values, dot_dtype)
    assert y.dtype == dot_dtype and y.shape == values.shape
    assert torch.equal(y.flatten().long(), numbers)


def test_wrong_values_are_named():
    with pytest.raises(ValueError, match="expected contiguous int8, got torch"):
        from_int8(torch.zeros(4), torch.float16)
    with pytest.raises(ValueError, match="expected contiguous int8, got torch"):
        from_int8(torch.zeros(4, 4, dtype=torch.int8).T, torch.float16)


@pytest.mark.usefixtures("runs_triton")
def test_a_kernel_of_16_bits_loads_them_in_16_bits_on_sm_90_alone(monkeypatch):
    values = torch.tensor([[-128, 127]], dtype=torch.int8)
    assert as_loaded(values, torch.float16) is values
    monkeypatch.setattr(choices, "card_of", lambda device: choices.SM_90)
    assert as_loaded(values, torch.float32) is values
    assert as_loaded(values.float(), torch.float16).dtype == torch.float32
    assert as_loaded(values, torch.float16).equal(values.half())

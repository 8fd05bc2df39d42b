"""Ghosts have the shape, strides, offset and alignment of the tensors that they stand for."""

import pytest
import torch

from fastdiff.kernels.device.language import triton
from fastdiff.warming.card import CARDS, pretended
from fastdiff.warming.ghosts import GPU, Ghost

VIEWS = {
    "rows": lambda x: x[1:],
    "odd": lambda x: x[:, 3:],
    "transposed": lambda x: x.T,
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "new axis": lambda x: x[None, :, ::2],
    "product": lambda x: x @ x.T,
    "expanded": lambda x: x[:1].expand(5, -1),
    "other dtype": lambda x: x.to(torch.float32) + 1,
    "convolution": lambda x: torch.nn.functional.conv2d(x.reshape(1, 4, 8, 8), x.reshape(4, 4, 4, 4)),
}


@pytest.fixture
def haunted():
    with pretended(CARDS["sm_90"]):
        yield


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.usefixtures("haunted")
def test_an_operation_gives_the_ghost_of_its_result(name):
    real = torch.randn(4, 64, dtype=torch.bfloat16)
    expected, found = VIEWS[name](real), VIEWS[name](real.to(GPU))
    assert isinstance(found, Ghost) and found.device == GPU and found.is_cuda and not found.is_meta
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    if expected.untyped_storage().data_ptr() == real.untyped_storage().data_ptr():
        assert found.data_ptr() - real.to(GPU).data_ptr() == expected.data_ptr() - real.data_ptr()
    assert found.data_ptr() % 16 == (expected.data_ptr() - expected.untyped_storage().data_ptr()) % 16


@pytest.mark.usefixtures("haunted")
def test_what_reaches_the_host_is_ones():
    ghost = torch.zeros(2, 3, device=GPU)
    assert ghost.tolist() == [[1.0] * 3] * 2 and bool(ghost.isfinite().all()) and int(ghost.sum()) == 1
    host = torch.zeros(2, 3)
    assert host.copy_(ghost).tolist() == [[1.0] * 3] * 2 and type(ghost.cpu()) is torch.Tensor


@pytest.mark.usefixtures("haunted")
def test_a_model_of_ghosts_takes_another_dtype():
    layer = torch.nn.Linear(4, 8, device=GPU, dtype=torch.float16).requires_grad_(False).to(torch.float32)
    assert isinstance(layer.weight, Ghost) and layer(torch.zeros(2, 4, device=GPU)).dtype == torch.float32


@pytest.mark.usefixtures("haunted")
def test_moves_to_the_card_and_changes_in_place():
    real = torch.arange(6)
    assert isinstance(real.pin_memory().to(GPU, non_blocking=True), Ghost)
    assert isinstance(torch.tensor([1, 2], device=GPU), Ghost) and isinstance(torch.arange(3, device=GPU), Ghost)
    ghost = real.to(GPU)
    assert isinstance(real.to(ghost), Ghost) and isinstance(ghost.new_tensor([1, 2]), Ghost)
    assert ghost.to(GPU) is ghost and ghost.add_(1) is ghost
    assert isinstance(torch.nn.Parameter(ghost, requires_grad=False), torch.nn.Parameter)
    assert type(real + 1) is torch.Tensor and (real + 1).tolist() == [1, 2, 3, 4, 5, 6]


def test_nothing_is_haunted_afterwards():
    def state():
        return torch.cuda.is_available(), torch.cuda.device, torch.inference_mode.__enter__, driver._active

    driver = triton.runtime.driver
    before = state()
    with pretended(CARDS["sm_80"]):
        assert torch.cuda.get_device_capability(0) == (8, 0) and torch.cuda.is_available()
        assert driver.active.get_current_target().arch == 80
    assert state() == before
    with torch.inference_mode():
        assert type(torch.ones(2)) is torch.Tensor and torch.ones(2).is_inference()

"""Devices and dtypes by name."""

import pytest
import torch

from fastdiff.errors import DeviceLostError, InputError
from fastdiff.execution.devices import (
    DTYPES,
    device_name,
    dtype_name,
    naming_lost_device,
    resolve_device,
    resolve_dtype,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "mps", "meta"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(InputError, match="device"):
        resolve_device(device)


def test_devices_count_from_0(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InputError, match=r"device: cuda:2 does not exist \(2 GPUs found\)"):
        resolve_device("cuda:2")


def test_auto_depends_on_the_machine():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items(), ids=DTYPES)
def test_dtypes_by_name_and_as_they_are(name, dtype):
    assert resolve_dtype(name, CPU) == resolve_dtype(dtype, CPU) == dtype
    assert dtype_name(dtype) == name


@pytest.mark.parametrize("dtype", ["int8", torch.int8, torch.float64, "torch.float32"], ids=str)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(InputError, match=r"dtype: .* is unknown; use auto, float32, bfloat16, float16"):
        resolve_dtype(dtype, CPU)


def test_the_cpu_has_no_name_of_its_own():
    assert device_name(CPU) == "cpu"


ASSERTION = """CUDA error: device-side assert triggered
Search for `cudaErrorAssert' in the documentation of CUDA for more information.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ASSERTION),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    ids=["torch", "cuBLAS", "Triton", "cuDNN"],
)
def test_a_lost_device_is_one_line(error):
    with pytest.raises(DeviceLostError, match="restart fastdiff, or use the CPU") as lost, naming_lost_device():
        raise error
    assert str(error).splitlines()[0] in str(lost.value) and "\n" not in str(lost.value)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: out of memory"), KeyError("x")],
    ids=["memory", "memory-of-CUDA", "another"],
)
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as passed, naming_lost_device():
        raise error
    assert passed.value is error

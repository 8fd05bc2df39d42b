"""Devices and dtypes by their names."""

import pytest
import torch

from fastdiff.errors import InputError
from fastdiff.execution.devices import DTYPES, device_name, dtype_name, resolve_device, resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "mps", "meta"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(InputError, match="device"):
        resolve_device(device)


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

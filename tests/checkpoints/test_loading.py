"""Load: options become one value, and bad options are errors before anything is read."""

import pytest
import torch

from fastdiff.checkpoints.loading import Load
from fastdiff.errors import InputError

CPU = torch.device("cpu")


def test_choices_are_resolved():
    assert Load.of(device="cpu") == Load(CPU, torch.float32)
    chosen = Load.of(device=CPU, dtype="bfloat16", variant="fp16", precision="int8", scheduler="euler")
    assert chosen == Load(CPU, torch.bfloat16, "fp16", "int8", scheduler="euler")
    assert Load.of(device="cpu", dtype=torch.float16).dtype == torch.float16


def test_weights_stay_on_the_host_where_parts_are_offloaded():
    gpu = torch.device("cuda")
    assert Load(gpu, torch.bfloat16).home == gpu
    assert Load(gpu, torch.bfloat16, offload=True).home == CPU


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device: 'tpu' is unknown"),
        ({"dtype": "int8"}, "dtype: 'int8' is unknown"),
        ({"precision": "fp4"}, "precision: 'fp4' is not one of full, int8, fp8"),
        ({"scheduler": "eular"}, "scheduler: 'eular' is not one of ddim"),
        ({"scheduler": ""}, "scheduler: '' is not one of ddim"),
        ({"offload": True}, "offload: it saves GPU memory, but the device is the CPU"),
        ({"offload": 1}, "offload: 1 is not true or false"),
    ],
    ids=str,
)
def test_choices_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message) as error:
        Load.of(**{"device": "cpu"} | options)
    assert len(str(error.value).splitlines()) == 1

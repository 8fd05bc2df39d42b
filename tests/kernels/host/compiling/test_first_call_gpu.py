"""A first call on a GPU, in a new process with an empty cache."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# Prints the kernels and the C code that this process compiled after everything should have been ready.
FIRST_CALL = """
import contextlib, subprocess, sys
import torch, triton
from fastdiff import UNet2DModel
from fastdiff.execution.replaying import cuda_graphs

compiled, compile_c = [], subprocess.check_call
ready = False

@contextlib.contextmanager
def block(only_compiling=cuda_graphs.only_compiling):
    global ready
    with only_compiling():
        yield
    ready = True

def listener(*, src, cache_hit, **_):
    if ready and not cache_hit:
        compiled.append(src.name)

def check_call(command, **options):
    if ready:
        compiled.append(str(command))
    return compile_c(command, **options)

cuda_graphs.only_compiling = block
triton.knobs.compilation.listener = listener
subprocess.check_call = check_call
model = UNet2DModel.from_pretrained("emoji64", device="cuda", dtype=torch.bfloat16)
for side in (64, 96):
    ready = False
    with torch.inference_mode():
        model(torch.zeros(1, 3, side, side, device="cuda", dtype=torch.bfloat16), 500, torch.zeros(1, dtype=int).cuda())
    assert ready
print(compiled)
"""


def test_a_first_call_has_all_compiled_side_by_side(tmp_path):
    """Kernels and, for Triton 3.6, the C code of their launches, for the model's own size and another size."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_CALL]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
    assert said.splitlines()[-1] == "[]"

"""Without Triton (macOS, Windows), every operation can be imported and runs on its torch reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import TIMEOUT

ROOT = Path(__file__).parents[3] / "kernels"
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py"))
SCRIPT = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "triton" else find_spec(name, *args)
sys.modules["triton"] = None  # makes `import triton` fail

import importlib
for module in sys.argv[1:]:
    importlib.import_module("fastdiff.kernels." + module)

import torch
from fastdiff.kernels.conv2d import conv2d
assert conv2d(torch.ones(1, 4, 4, 2), torch.ones(3, 2, 3, 3), padding=1)[0, 1, 1].tolist() == [18.0] * 3
"""


@pytest.mark.slow
def test_kernels_import_and_run():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr

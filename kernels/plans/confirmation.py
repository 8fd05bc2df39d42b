"""Whether plans for sm_90 run in the Triton that is installed: by `VERSIONS`, or else by a verdict."""

import torch

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.launching import is_sm_90
from fastdiff.kernels.plans import verdict

REMEDY = "fastdiff doctor --check-kernels"
# The versions of Triton in which the kernels in Gluon passed their tests on a card. Gluon is experimental: its names,
# and the code that it makes of a kernel, change between versions. The plans were first measured in 3.6. In 3.7.1 all
# 426 GPU tests named hopper passed beside torch 2.11. 3.8.0 compiles no convolution, and 102 tests of the other kernels
# passed before the time was up. In 3.9.0 5 of 165 tests failed in the last run, and the cause is not known.
VERSIONS = ((3, 6), (3, 7))


def known_version() -> tuple[int, int] | None:
    """The version of Triton that is installed, where the kernels in Gluon are known to work in it."""
    return next((version for version in VERSIONS if triton.__version__.startswith("{}.{}.".format(*version))), None)


def needs_verdict(device: torch.device) -> bool:
    """Whether the device is an sm_90 and nobody has confirmed the kernels in Gluon in this Triton."""
    return is_sm_90(device) and isinstance(triton.__version__, str) and known_version() is None


def in_force(device: torch.device) -> verdict.Verdict | None:
    """The verdict that decides on the device; None where there is none, or where none is needed."""
    return verdict.reading(device).verdict if needs_verdict(device) else None


def plan_obstacle(plan: str, device: torch.device) -> str | None:
    """Say why a verdict has a plan off on the device, if it does. Without a verdict `gluon_obstacle` says why."""
    found = in_force(device)
    if found is None or plan in found.passed:
        return None
    how = "failed" if plan in found.failed else "was not in"
    return f"it {how} {REMEDY} in triton {triton.__version__}"


def gluon_obstacle(device: torch.device) -> str | None:
    """Say why kernels in Gluon are not launched on the device, if they are not."""
    if not is_sm_90(device):
        return "Gluon: the device is no sm_90"
    if known_version() is None and verdict.reading(device).verdict is None:
        return f"Gluon: not known to work in triton {triton.__version__}"
    return None


def notice(device: torch.device) -> str | None:
    """The line that says that the fast kernels are off on the device, why, and what to do; None where they are on."""
    if not needs_verdict(device):
        return None
    found, problem = verdict.reading(device)
    if found is None:
        reason = f"nobody has confirmed them in Triton {triton.__version__}" + (f", and {problem}" if problem else "")
        return f"the fast kernels are off: {reason}; `{REMEDY}` tries them on this machine"
    if not found.passed:
        return f"the fast kernels are off: none passed `{REMEDY}` in Triton {triton.__version__}"
    return None

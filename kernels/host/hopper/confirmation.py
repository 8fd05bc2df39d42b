"""Whether plans for sm_90 run in the Triton that is installed: by `gluon.VERSIONS`, or else by a verdict."""

import torch

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.hopper import gluon, verdict
from fastdiff.kernels.host.launching import is_sm_90

REMEDY = "fastdiff doctor --check-kernels"


def needs_verdict(device: torch.device) -> bool:
    """Whether the device is an sm_90 and nobody has confirmed the kernels in Gluon in this Triton."""
    return is_sm_90(device) and isinstance(triton.__version__, str) and gluon.known_version() is None


def in_force(device: torch.device) -> verdict.Verdict | None:
    """The verdict that decides on the device; None where there is none, or where none is needed."""
    return verdict.reading(device).verdict if needs_verdict(device) else None


def plan_obstacle(plan: str | None, device: torch.device) -> str | None:
    """Say why a plan is off on the device, if a verdict says so; without a verdict `gluon.obstacle` speaks."""
    found = in_force(device)
    if found is None or plan in found.passed:
        return None
    how = "failed" if plan in found.failed else "was not in"
    return f"it {how} {REMEDY} in triton {triton.__version__}"


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

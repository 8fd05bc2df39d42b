"""Decide whether plans for sm_90 run in the installed Triton: by `VERSIONS`, otherwise by a verdict."""

import torch

from fastdiff.kernels.host.launching import is_sm_90
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.plans import verdict

REMEDY = "fastdiff doctor --check-kernels"
# The versions of Triton in which the Gluon kernels passed their GPU tests, each beside torch 2.11 on an H200. Gluon is
# experimental: its names and the code that it generates change between versions. A plan that a version cannot compile,
# or runs more slowly, has that version in its `off_in`.
VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))


def known_version() -> tuple[int, int] | None:
    """Return the installed version of Triton if the Gluon kernels are known to work in it, otherwise None."""
    return next((version for version in VERSIONS if triton.__version__.startswith("{}.{}.".format(*version))), None)


def needs_verdict(device: torch.device) -> bool:
    """Whether the device is an sm_90, and the Gluon kernels are not known to work in this Triton."""
    return is_sm_90(device) and isinstance(triton.__version__, str) and known_version() is None


def in_force(device: torch.device) -> verdict.Verdict | None:
    """Return the verdict that decides for the device; None if there is none, or if none is needed."""
    return verdict.reading(device).verdict if needs_verdict(device) else None


def plan_obstacle(plan: str, device: torch.device) -> str | None:
    """Return why a verdict turns a plan off on the device; None if it does not.

    None without a verdict too: `gluon_obstacle` covers that case.
    """
    found = in_force(device)
    if found is None or plan in found.passed:
        return None
    how = "failed" if plan in found.failed else "was not tried by"
    return f"it {how} {REMEDY} in triton {triton.__version__}"


def gluon_obstacle(device: torch.device) -> str | None:
    """Return why Gluon kernels are not launched on the device; None if they are."""
    if not is_sm_90(device):
        return "Gluon: the device is not sm_90"
    if known_version() is None and verdict.reading(device).verdict is None:
        return f"Gluon: not known to work in triton {triton.__version__}"
    return None


def notice(device: torch.device) -> str | None:
    """Return a line that says why the fast kernels are off on the device and what to do; None if they are on."""
    if not needs_verdict(device):
        return None
    found, problem = verdict.reading(device)
    if found is None:
        reason = f"nobody has confirmed them in Triton {triton.__version__}" + (f", and {problem}" if problem else "")
        return f"the fast kernels are off: {reason}; `{REMEDY}` tries them on this machine"
    if not found.passed:
        return f"the fast kernels are off: none passed `{REMEDY}` in Triton {triton.__version__}"
    return None

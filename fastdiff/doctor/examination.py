"""All findings of `fastdiff doctor`, in order, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

import fastdiff
from fastdiff.doctor import folders, kernels, machine, packages, speed
from fastdiff.doctor.finding import Finding


def examine() -> list[Finding]:
    """Examine this machine. Takes about a second, mostly to measure speed. Draws nothing, and reads no model."""
    found = machine.Machine.look()
    return [
        *machine.findings(found),
        *kernels.findings(found),
        *speed.findings(found.device),
        *folders.findings(),
        *packages.findings(),
    ]


def as_table(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, then a line that names the ones with a problem."""
    wrong = [finding.name for finding in findings if finding.is_wrong]
    end = f"problems, marked with !: {', '.join(wrong)}" if wrong else "no problems found"
    return "\n".join([*map(str, findings), end])


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as one JSON object."""
    return {
        "fastdiff": fastdiff.__version__,
        "ok": not any(finding.is_wrong for finding in findings),
        "findings": [finding.as_dict() for finding in findings],
    }

"""All that `fastdiff doctor` looks at, in order, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

import fastdiff
from fastdiff.doctor import folders, kernels, machine, packages, speed
from fastdiff.doctor.finding import Finding


def examine() -> list[Finding]:
    """Look at this machine. Takes about a second, most of it to measure speed; draws nothing, reads no model."""
    found = machine.Machine.look()
    return [
        *machine.findings(found),
        *kernels.findings(found),
        *speed.findings(found.device),
        *folders.findings(),
        *packages.findings(),
    ]


def as_table(findings: Sequence[Finding]) -> str:
    """A line for each finding, then how many are wrong."""
    wrong = [finding.name for finding in findings if finding.is_wrong]
    end = f"wrong, marked by !: {', '.join(wrong)}" if wrong else "nothing is wrong"
    return "\n".join([*map(str, findings), end])


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """One JSON object."""
    return {
        "fastdiff": fastdiff.__version__,
        "ok": not any(finding.is_wrong for finding in findings),
        "findings": [finding.as_dict() for finding in findings],
    }

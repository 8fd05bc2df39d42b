"""Fixtures for a mocked sm_90 machine with an unconfirmed Triton."""

import json
from pathlib import Path

import pytest
import torch

from fastdiff.kernels.plans import choices, confirmation, verdict


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of the test's verdict file, which does not exist yet."""
    monkeypatch.setenv(verdict.VARIABLE, str(tmp_path / "cache" / "kernels.json"))
    verdict.forget()
    yield tmp_path / "cache" / "kernels.json"
    verdict.forget()


@pytest.fixture
def unknown_triton(file, monkeypatch) -> Path:
    """The verdict file's path on a machine where no plan is known to work. Kernels run as usual on this machine."""
    triton = pytest.importorskip("triton", reason="no Triton here")
    monkeypatch.setattr(confirmation, "is_sm_90", lambda device: True)
    monkeypatch.setattr(triton, "__version__", "77.1.0")
    return file


@pytest.fixture
def write_verdict(unknown_triton):
    """Write the verdict of a check in which some plans failed, and make the next call read it."""

    def write(*failed: str) -> verdict.Verdict:
        reasons = dict.fromkeys(failed, "the error is 3")
        made = verdict.Verdict(
            verdict.surroundings(torch.device("cpu")), choices.CHOICES.plans - reasons.keys(), reasons
        )
        unknown_triton.parent.mkdir(exist_ok=True)
        unknown_triton.write_text(json.dumps(made.as_dict()))
        verdict.forget()
        return made

    return write

"""The verdict file: which sm_90 plans passed on this machine, in a Triton that is not in `confirmation.VERSIONS`.

Only `fastdiff doctor --check-kernels` writes the file, `$FASTDIFF_VERDICT` (default: `~/.cache/fastdiff/kernels.json`).
A process reads the file once, so no bits change during the process.
"""

import ctypes
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from fastdiff import __version__
from fastdiff.kernels.host.lazy_triton import triton

VARIABLE = "FASTDIFF_VERDICT"
SCHEMA = 1
MOST_BYTES = 2**20  # of a file

_lock = Lock()  # the first calls of two threads must see the same file


@dataclass(frozen=True)
class Verdict:
    """The plans that passed and failed, and the versions they were run with."""

    made_with: Mapping[str, str]  # card, driver, torch, triton and fastdiff
    passed: frozenset[str]  # names of plans
    failed: Mapping[str, str]  # name of a plan -> why it failed

    @property
    def digest(self) -> str:
        """A short hash of the plans that passed and failed, which affect the bits of a picture."""
        plans = json.dumps([sorted(self.passed), sorted(self.failed)])
        return hashlib.sha256(plans.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        plans = {"passed": sorted(self.passed), "failed": dict(sorted(self.failed.items()))}
        return {"schema": SCHEMA, **self.made_with, **plans}


class Reading(NamedTuple):
    """The verdict that applies, or why the file's verdict does not apply ("" if there is no file)."""

    verdict: Verdict | None
    problem: str = ""


def file() -> Path:
    """Return the path of the verdict file, which need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(VARIABLE) or Path(cache, "fastdiff", "kernels.json"))


def reading(device: torch.device) -> Reading:
    """Return the verdict as of this process's first call. Later changes to the file are ignored."""
    with _lock:
        return _reading(device)


@functools.cache
def _reading(device: torch.device) -> Reading:
    found = _first_look()
    return found if found.verdict is None else compare(found.verdict, surroundings(device))


@functools.cache
def _first_look() -> Reading:
    return read(file())


def forget() -> None:
    """Make the next call read the file again, as a new process would. For tests."""
    _reading.cache_clear()
    _first_look.cache_clear()


def read(path: Path) -> Reading:
    """Read a verdict file, whatever its content."""
    try:
        with open(path, "rb") as opened:
            content = json.loads(opened.read(MOST_BYTES))
        if content["schema"] != SCHEMA:
            raise ValueError(content["schema"])
        made_with = {name: _text(content[name]) for name in ("card", "driver", "torch", "triton", "fastdiff")}
        passed = frozenset(map(_text, content["passed"]))
        failed = {_text(name): _text(why) for name, why in content["failed"].items()}
    except FileNotFoundError:
        return Reading(None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Reading(None, f"{path} is not a verdict file")
    return Reading(Verdict(made_with, passed - failed.keys(), failed))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def compare(verdict: Verdict, here: Mapping[str, str]) -> Reading:
    """Accept a verdict only if it was made with this card, driver, torch, Triton and fastdiff."""
    for name, value in here.items():
        if verdict.made_with[name] != value:
            return Reading(None, f"the verdict was made with {name} {verdict.made_with[name]:.80}, not {value}")
    return Reading(verdict)


def surroundings(device: torch.device) -> dict[str, str]:
    """Return the card, driver, torch, Triton and fastdiff of this process. A verdict must match them all."""
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": driver_version() or "unknown",
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "fastdiff": __version__,
    }


@functools.cache
def driver_version() -> str | None:
    """Return the version of NVIDIA's driver ("570.86.15") from its library; None if the library is missing."""
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            nvml = ctypes.CDLL(name)
        except OSError:
            continue
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode(errors="replace")
    return None

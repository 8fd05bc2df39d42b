"""The verdict file: which plans for sm_90 passed on this machine, in a Triton that is not in `gluon.VERSIONS`.

`fastdiff doctor --check-kernels` alone writes `$FASTDIFF_VERDICT`, by default `~/.cache/fastdiff/kernels.json`. A
process reads the file once, so that no bit changes while the process lives.
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
from fastdiff.kernels.device.language import triton

VARIABLE = "FASTDIFF_VERDICT"
SCHEMA = 1
MOST_BYTES = 2**20  # of a file

_lock = Lock()  # two threads that ask first read one file


@dataclass(frozen=True)
class Verdict:
    """The plans that passed and failed, and what they were run with."""

    made_with: Mapping[str, str]  # card, driver, torch, triton and fastdiff
    passed: frozenset[str]  # names of plans
    failed: Mapping[str, str]  # names of plans, and why

    @property
    def digest(self) -> str:
        """A short name of the plans that passed and of those that failed, which decide the bits of a picture."""
        plans = json.dumps([sorted(self.passed), sorted(self.failed)])
        return hashlib.sha256(plans.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """The content of the file, for JSON."""
        plans = {"passed": sorted(self.passed), "failed": dict(sorted(self.failed.items()))}
        return {"schema": SCHEMA, **self.made_with, **plans}


class Reading(NamedTuple):
    """The verdict that counts, if one does; else why the file does not count, "" where there is no file."""

    verdict: Verdict | None
    problem: str = ""


def file() -> Path:
    """The path of the verdict file, which need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(VARIABLE) or Path(cache, "fastdiff", "kernels.json"))


def reading(device: torch.device) -> Reading:
    """The verdict as this process found it when it first asked. Later changes of the file do not count."""
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
    """Have the next question read the file again, as a new process would: for tests."""
    _reading.cache_clear()
    _first_look.cache_clear()


def read(path: Path) -> Reading:
    """Read a verdict file, whatever the file holds."""
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
        return Reading(None, f"{path} is no verdict")
    return Reading(Verdict(made_with, passed - failed.keys(), failed))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def compare(verdict: Verdict, here: Mapping[str, str]) -> Reading:
    """Keep a verdict that was made with what is here: card, driver, torch, Triton and fastdiff."""
    for name, value in here.items():
        if verdict.made_with[name] != value:
            return Reading(None, f"the verdict is of {name} {verdict.made_with[name]:.80}, not {value}")
    return Reading(verdict)


def surroundings(device: torch.device) -> dict[str, str]:
    """The card, driver, torch, Triton and fastdiff of this process, by which a verdict counts."""
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": driver_version() or "unknown",
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "fastdiff": __version__,
    }


@functools.cache
def driver_version() -> str | None:
    """The version of NVIDIA's driver as its library tells it ("570.86.15"); None where there is no such library."""
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            nvml = ctypes.CDLL(name)
        except OSError:
            continue
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode(errors="replace")
    return None

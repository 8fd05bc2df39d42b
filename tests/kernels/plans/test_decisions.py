"""How calls run over a broad grid of shapes: their kernels and tiles must equal the recorded ones.

A call that runs in another way may round differently. After an intended change, record again:
`python -m tests.kernels.plans.test_decisions` writes decisions.json.
"""

import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdiff.kernels.host import launching
from fastdiff.kernels.plans import choices, confirmation, verdict
from tests.kernels.plans.calls import GROUPS

triton = pytest.importorskip("triton", reason="no Triton here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter cannot skip launches", allow_module_level=True)

MULTIPROCESSORS = {80: 108, 89: 128, 90: 132, 120: 170}
UNKNOWN = "77.1.0"
# The card, the version of Triton, and the share of plans that passed in the verdict; None without a verdict.
MACHINES: dict[str, tuple[int, str, float | None]] = {
    "sm_90, Triton 3.6": (90, "3.6.0", None),
    "sm_90, Triton 3.7": (90, "3.7.1", None),
    "sm_90, another Triton": (90, UNKNOWN, None),
    "sm_90, another Triton, a verdict": (90, UNKNOWN, 0.5),
    "sm_89, Triton 3.6": (89, "3.6.0", None),
    "sm_120, Triton 3.9": (120, "3.9.0", None),
}
FEW, MANY = 32, 4  # one in 32 calls, one in 4 calls
FILE = Path(__file__).parent / "decisions.json"
RECORDED = json.loads(FILE.read_text())  # digests by machine, few or many, and group of calls


@contextlib.contextmanager
def machine(name: str) -> Iterator[None]:
    """Make operations decide as on a machine. Nothing may be launched."""
    capability, version, share = MACHINES[name]
    target = SimpleNamespace(backend="cuda", arch=capability, warp_size=32)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(confirmation, "is_sm_90", lambda device: capability == 90)
        patches.setattr(choices, "card_of", lambda device: f"sm_{capability}")
        patches.setattr(choices, "unavailable", lambda device: None)
        patches.setattr(launching, "INTERPRETER_CAPABILITY", divmod(capability, 10))
        patches.setattr(launching, "INTERPRETER_MULTIPROCESSORS", MULTIPROCESSORS[capability])
        patches.setattr(triton, "__version__", version)
        patches.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: target))
        patches.setattr(verdict, "reading", lambda device: verdict.Reading(made_verdict(share)))
        yield


def made_verdict(share: float | None) -> verdict.Verdict | None:
    """Return a verdict in which a share of the plans, first by name, passed; None if `share` is None."""
    plans = sorted(choices.CHOICES.plans)
    return None if share is None else verdict.Verdict({}, frozenset(plans[: int(share * len(plans))]), {})


def way(call: Callable[[], Any]) -> list[Any]:
    """Return the kernels that a call launches, with their grids and constants; empty if only torch runs."""
    launched: list[Any] = []

    def run(kernel, *args, grid, warmup, **constants):
        decided = {name: value for name, value in constants.items() if name.isupper() or name.startswith("num_")}
        launched.append((kernel.__name__, grid, sorted(decided.items())))

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(triton.runtime.jit.JITFunction, "run", run)
        call()
    return launched


@functools.cache
def chosen(group: str, one_in: int) -> list[tuple[str, Callable[[], Any]]]:
    """Return some calls of a group, chosen by a hash of their names. All machines make the same calls."""
    return [(name, call) for name, call in GROUPS[group]() if zlib.crc32(name.encode()) % one_in == 0]


def digest(calls: Iterable[tuple[str, Callable[[], Any]]]) -> str:
    """Return a digest of how calls run."""
    ways = hashlib.sha256()
    for name, call in calls:
        ways.update(f"{name}: {way(call)}\n".encode())
    return ways.hexdigest()[:16]


def digests(name: str, one_in: int) -> dict[str, str]:
    with machine(name):
        return {group: digest(chosen(group, one_in)) for group in GROUPS}


@pytest.mark.parametrize("name", MACHINES)
def test_some_calls_run_as_they_were_recorded(name):
    assert digests(name, FEW) == RECORDED[name]["few"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_calls_run_as_they_were_recorded(name):
    assert digests(name, MANY) == RECORDED[name]["many"]


if __name__ == "__main__":
    made = {name: {"few": digests(name, FEW), "many": digests(name, MANY)} for name in MACHINES}
    FILE.write_text(json.dumps(made, indent=1) + "\n")

"""The way that every call runs, with its tiles, over a broad grid: recorded, and the same ever since.

A call that runs another way may round otherwise. A change that is meant to do that records anew what it changes:
`python -m tests.kernels.plans.test_decisions` writes decisions.json.
"""

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdiff.kernels.host import launching
from fastdiff.kernels.plans import choices, confirmation, verdict
from tests.kernels.plans.calls import GROUPS, Calls

triton = pytest.importorskip("triton", reason="no Triton here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches what it defines", allow_module_level=True)

MULTIPROCESSORS = {80: 108, 89: 128, 90: 132, 120: 170}
UNKNOWN = "77.1.0"
# The card, the version of Triton, and the share of plans that a verdict has passed, where there is one.
MACHINES: dict[str, tuple[int, str, float | None]] = {
    "sm_90, Triton 3.6": (90, "3.6.0", None),
    "sm_90, Triton 3.7": (90, "3.7.1", None),
    "sm_90, another Triton": (90, UNKNOWN, None),
    "sm_90, another Triton, a verdict": (90, UNKNOWN, 0.5),
    "sm_89, Triton 3.6": (89, "3.6.0", None),
}
FEW, MANY = 32, 4  # one call in so many
FILE = Path(__file__).parent / "decisions.json"
RECORDED = json.loads(FILE.read_text())  # digests by machine, few or many, and group of calls


@contextlib.contextmanager
def machine(name: str) -> Iterator[None]:
    """Have operations decide as on a machine, and launch nothing."""
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
    """A verdict that passed the first so many plans by name; None where there is none."""
    plans = sorted(choices.CHOICES.plans)
    return None if share is None else verdict.Verdict({}, frozenset(plans[: int(share * len(plans))]), {})


def way(call: Callable[[], Any]) -> list[Any]:
    """The kernels that a call launches, with their grids and constants; none where torch does all."""
    launched: list[Any] = []

    def run(kernel, *args, grid, warmup, **constants):
        decided = {name: value for name, value in constants.items() if name.isupper() or name.startswith("num_")}
        launched.append((kernel.__name__, grid, sorted(decided.items())))

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(triton.runtime.jit.JITFunction, "run", run)
        call()
    return launched


def digest(calls: Calls, one_in: int) -> str:
    """A digest of the ways of some of the calls, chosen by their names."""
    ways = hashlib.sha256()
    for name, call in calls:
        if zlib.crc32(name.encode()) % one_in == 0:
            ways.update(f"{name}: {way(call)}\n".encode())
    return ways.hexdigest()[:16]


def digests(name: str, one_in: int) -> dict[str, str]:
    with machine(name):
        return {group: digest(calls(), one_in) for group, calls in GROUPS.items()}


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

"""Plans that hang, crash, fail and pass in child processes, and the resulting verdict."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastdiff.doctor import checking
from fastdiff.errors import InputError
from fastdiff.kernels.plans import choices, verdict
from tests.support.waiting import TIMEOUT

ROOT = Path(__file__).parents[2]
CHILD = """
import os, signal, sys, time
from fastdiff.doctor.child import WrongError, serve

def judge(plan, device):
    assert device == "cuda:7"
    if plan == "hangs":
        time.sleep(1000)
    if plan == "exits":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(7)
    if plan == "crashes":
        os.abort()
    if plan == "wrong":
        raise WrongError("the error is 3")
    if plan == "raises":
        raise RuntimeError("CUDA error\\nat address 0")
    print("not an answer")

serve(judge)
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command of the tests' child process, which imports no torch and so starts quickly."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    return [sys.executable, str(script)]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_what_hangs_or_crashes_harms_no_other_plan(command):
    plans = ["fine", "wrong", "fine too", "raises", "exits", "crashes", "fine at last", "hangs", "fine behind it"]
    said: list[tuple[str, str | None]] = []
    failed = checking.check_plans(plans, "cuda:7", lambda *each: said.append(each), command=command, limit=2.0)
    assert failed == {
        "wrong": "the error is 3",
        "raises": "RuntimeError: CUDA error at address 0",
        "exits": "ended its process with exit code 7 (out of luck)",
        "crashes": "ended its process with signal 6",
        "hangs": "did not finish in 2 s",
    }
    assert [plan for plan, _ in said] == plans and dict(said) == dict.fromkeys(plans) | failed


def test_every_group_of_plans_is_tried(command):
    plans = [f"plan {i}" for i in range(3 * checking.GROUP + 1)]
    said: list[str] = []
    assert checking.check_plans(plans, "cuda:7", lambda plan, why: said.append(plan), command=command) == {}
    assert sorted(said) == sorted(plans)


def test_a_child_that_does_not_start_is_one_line(command):
    start = [sys.executable, "-c", "import no_such_module"]
    with pytest.raises(OSError, match=r"^the process that tries the kernels did not start: .* \(ModuleNotFoundError"):
        checking.check_plans(["fine"], "cuda:7", lambda *each: None, command=start)


def test_a_child_ends_with_its_parent(command):
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        print(json.dumps({"device": "cuda:7", "plans": ["hangs"]}), file=child.stdin, flush=True)
        assert json.loads(child.stdout.readline()) == {"ready": True}
        child.stdin.close()
        assert child.wait(TIMEOUT) == 1


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "cache" / "kernels.json"
    monkeypatch.setenv(verdict.VARIABLE, str(path))
    return path


def test_the_verdict_is_written_and_read_back(file, monkeypatch):
    tried = []

    def check(plans, device, report):
        tried.extend(plans)
        return {plans[0]: "did not finish in 300 s"}

    monkeypatch.setattr(checking, "check_plans", check)
    made = checking.check_kernels(torch.device("cpu"), lambda *each: None)
    assert set(tried) == choices.CHOICES.plans and made.passed == choices.CHOICES.plans - {tried[0]}
    assert verdict.read(file).verdict == made
    content = json.loads(file.read_text())
    assert content["failed"] == {tried[0]: "did not finish in 300 s"}
    assert {"card", "driver", "torch", "triton", "fastdiff"} < content.keys()
    assert os.listdir(file.parent) == [file.name]


def test_a_verdict_replaces_the_earlier_one_whole_or_not_at_all(file, monkeypatch):
    made = verdict.Verdict(verdict.surroundings(torch.device("cpu")), frozenset({"a plan"}), {})
    checking.write(file, made)

    def fail(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=r"^cannot write the verdict .* \(No space left on device\); make room, or set"):
        checking.write(file, verdict.Verdict(made.made_with, frozenset(), {}))
    assert verdict.read(file).verdict == made and os.listdir(file.parent) == [file.name]


def test_there_is_nothing_to_check_without_such_a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(checking, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=r"^--check-kernels: the fast kernels need an sm_90"):
        checking.find_card()
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^--check-kernels: Triton is not installed; pip install triton$"):
        checking.find_card()


def test_the_first_card_of_sm_90_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(checking, "find_spec", lambda name: object())
    monkeypatch.setattr(checking, "is_sm_90", lambda device: device.index > 0)
    assert checking.find_card() == torch.device("cuda", 1)

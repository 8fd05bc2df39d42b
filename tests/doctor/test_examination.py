"""`fastdiff doctor`: its findings on all kinds of machines, and the command."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff import cli
from fastdiff.doctor import examination, folders, kernels, machine, packages, speed
from fastdiff.doctor.finding import Finding
from fastdiff.doctor.machine import Machine
from fastdiff.kernels.plans import choices, confirmation
from fastdiff.kernels.plans.tuning import Table
from tests.support.waiting import TIMEOUT

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
BARE = Machine(cards=(), device=CPU, driver=None, triton=None)
CARD = Machine(cards=("NVIDIA H200",), device=CPU, driver="570.1", triton="3.6.0", cuda="13.0")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure only small sizes, and describe cards that do not exist."""
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "SIDE", {"cpu": 8})
    monkeypatch.setattr(speed, "BYTES", {"cpu": 64})
    monkeypatch.setattr(machine, "_described", lambda index, name: f"{name}, sm_90, 140 GiB")


def found(findings: list[Finding], name: str) -> Finding:
    (one,) = [finding for finding in findings if finding.name == name]
    return one


@pytest.mark.parametrize(
    ("here", "platform", "wrong"),
    [
        pytest.param(BARE, "CPU", [], id="cpu"),
        pytest.param(replace(BARE, has_mps=True), "MPS", [], id="mac"),
        pytest.param(CARD, "CUDA", [], id="cuda"),
        pytest.param(replace(CARD, hip="7.0", cuda=None, driver=None), "ROCm", [], id="rocm"),
        pytest.param(replace(BARE, driver="570.1"), "CPU", ["card"], id="torch-for-cpu"),
        pytest.param(replace(BARE, driver="570.1", cuda="13.0", problem="too old"), "CPU", ["card"], id="no-card-seen"),
        pytest.param(replace(CARD, triton=None), "CUDA without Triton", ["triton"], id="no-triton"),
    ],
)
def test_machines(monkeypatch, here, platform, wrong):
    monkeypatch.setattr(sys, "platform", "linux")
    findings = machine.findings(here)
    assert [finding.name for finding in findings if finding.is_wrong] == wrong
    assert found(findings, "runs").text == f"{platform}: {machine.PLATFORMS[platform]}"


def test_remedies_name_what_is_wrong(monkeypatch):
    without = found(machine.findings(replace(BARE, driver="570.1")), "card")
    assert "torch is built without CUDA; install torch for CUDA" in str(without)
    hidden = found(machine.findings(replace(BARE, driver="570.1", cuda="13.0", problem="too old")), "card")
    assert "torch sees no card (too old); check whether nvidia-smi lists a card" in str(hidden)
    monkeypatch.setattr(sys, "platform", "win32")
    assert not found(machine.findings(replace(CARD, triton=None)), "triton").is_wrong, "Windows has no Triton"


def test_kernels_are_off_without_a_card():
    (finding,) = kernels.findings(BARE)
    assert finding.text.startswith("off") and not finding.is_wrong


def test_the_table_in_use_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "current", lambda device: Table("tables/nvidia-h200.json"))
    monkeypatch.setattr(kernels, "fp8_obstacle", lambda device: None)
    monkeypatch.setattr(kernels, "fast_kernels", lambda device: Finding("fast kernels", "on"))
    finding = found(kernels.findings(CARD), "kernels")
    assert finding.text == "on; tiles by tables/nvidia-h200.json"
    assert finding.as_dict()["tiles"] == "tables/nvidia-h200.json"


class TestFastKernels:
    """On the tests' device, mocked as an sm_90."""

    @pytest.fixture(autouse=True)
    def on_sm_90(self, unknown_triton, monkeypatch):
        monkeypatch.setattr(kernels, "is_sm_90", lambda device: True)

    def test_are_on_in_a_confirmed_triton(self, monkeypatch):
        monkeypatch.setattr(confirmation, "VERSIONS", ((77, 1),))
        finding = kernels.fast_kernels(CPU)
        assert (
            finding.text.startswith(f"on: {len(choices.CHOICES.plans)} of {len(choices.CHOICES.plans)} plans")
            and not finding.is_wrong
        )

    def test_are_off_without_a_verdict(self, unknown_triton):
        finding = kernels.fast_kernels(CPU)
        assert finding.text == "off: nobody has confirmed them in this Triton"
        assert finding.remedy == "run fastdiff doctor --check-kernels"

    def test_are_on_by_a_verdict(self, write_verdict):
        made = write_verdict()
        finding = kernels.fast_kernels(CPU)
        assert finding.text.startswith(f"on: {len(made.passed)} of {len(made.passed)} plans") and not finding.is_wrong

    def test_failures_are_wrong(self, write_verdict):
        write_verdict("linear 640 to 640", "geglu 640 to 5120")
        finding = kernels.fast_kernels(CPU)
        assert "2 failed, such as geglu 640 to 5120: the error is 3" in finding.text and finding.is_wrong
        assert finding.values["failed"] == dict.fromkeys(("geglu 640 to 5120", "linear 640 to 640"), "the error is 3")

    def test_are_not_for_other_cards(self, monkeypatch):
        monkeypatch.setattr(kernels, "is_sm_90", lambda device: False)
        monkeypatch.setattr(kernels, "capability", lambda device: (8, 9))
        finding = kernels.fast_kernels(CPU)
        assert finding.text.endswith("the card is sm_89") and not finding.is_wrong


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path):
    assert not folders.folder_finding("hub cache", tmp_path / "not" / "yet", "HF_HOME").is_wrong
    (tmp_path / "file").touch()
    finding = folders.folder_finding("hub cache", tmp_path / "file" / "below", "HF_HOME")
    assert finding.is_wrong and "cannot be written" in finding.text
    assert finding.remedy == "set HF_HOME to another folder"


def test_a_full_disk_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(folders, "LEAST_FREE", 2**80)
    assert folders.folder_finding("hub cache", tmp_path, "HF_HOME").remedy.startswith("make room")


@pytest.mark.parametrize(
    ("version", "text", "wrong"),
    [
        (None, "not installed; for fastdiff ui", False),
        ("6.3.9", "6.3.9; for fastdiff ui", True),
        ("6.20.0", "6.20.0, for fastdiff ui", False),
        ("10.0", "10.0, for fastdiff ui", False),
    ],
)
def test_packages(monkeypatch, version, text, wrong):
    monkeypatch.setattr(packages, "version_of", lambda name: version if name == "gradio" else "99.0")
    finding = found(packages.findings(), "gradio")
    assert (finding.text, finding.is_wrong) == (text, wrong)


def test_the_oldest_packages_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, (oldest, _) in packages.OPTIONAL.items():
        assert f'"{name}>={oldest}"' in project, name


@pytest.mark.parametrize(
    ("card", "reached"),
    [
        ("NVIDIA H200", (989.0, 4.8)),
        ("NVIDIA H100 80GB HBM3", (989.0, 3.35)),
        ("NVIDIA H100 PCIe", (756.0, 2.0)),
        ("NVIDIA A100-SXM4-80GB", (312.0, 2.039)),
        ("NVIDIA A100-SXM4-40GB", (312.0, 1.555)),
        ("NVIDIA A100 80GB PCIe", (312.0, 1.935)),
        ("NVIDIA GeForce RTX 4090", (165.2, 1.008)),
        ("NVIDIA L4", (121.0, 0.3)),
        ("NVIDIA L40S", (362.0, 0.864)),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_what_a_card_reaches(card, reached):
    assert speed.reach(card) == reached


def test_speed_is_measured_and_named():
    products, copies = speed.findings(CPU)
    assert re.fullmatch(r"products in float32: \S+ TFLOP/s", products.text) and products.values["measured"] > 0
    assert re.fullmatch(r"copies: \S+ TB/s, read and written", copies.text) and copies.values["data sheet"] is None


def test_a_full_card_is_no_error(monkeypatch):
    def fail(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "_products", fail)
    (finding,) = speed.findings(CPU)
    assert finding.text.startswith("not measured") and not finding.is_wrong


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_says_in_its_exit_code_whether_something_is_wrong(monkeypatch, capsys, wrong):
    findings = [Finding("card", "none"), Finding("triton", "not\ninstalled", "pip install triton" if wrong else "")]
    monkeypatch.setattr(examination, "examine", lambda: findings)
    assert cli.main(["doctor"]) == int(wrong)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  card          none" and lines[-1] == (
        "problems, marked with !: triton" if wrong else "no problems found"
    )
    assert ("! triton        not" in lines[1]) is wrong
    assert cli.main(["doctor", "--json"]) == int(wrong)
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is not wrong and [each["name"] for each in printed["findings"]] == ["card", "triton"]


@pytest.mark.parametrize("args", [["emoji64"], ["--jsn"], ["--json=1"], ["--check-kernels=x"]])
def test_other_arguments_are_refused(capsys, args):
    assert cli.main(["doctor", *args]) == 2
    assert capsys.readouterr().err.startswith("fastdiff: error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_kernels_cannot_be_checked_without_a_card(capsys):
    assert cli.main(["doctor", "--check-kernels"]) == 2
    assert re.fullmatch(r"fastdiff: error: --check-kernels: .*\n", capsys.readouterr().err)


def test_the_command_as_a_program_without_optional_packages(tmp_path):
    """Triton, gradio, diffusers and transformers cannot be imported."""
    program = (
        "import sys; sys.modules.update(triton=None, gradio=None, diffusers=None, transformers=None)\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "from fastdiff import cli; sys.argv[1:] = ['doctor', '--json']; sys.exit(cli.main())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode in (0, 1) and done.stderr == "", done.stderr
    printed = json.loads(done.stdout)
    names = [each["name"] for each in printed["findings"]]
    assert {"card", "torch", "kernels", "speed", "hub cache", "Triton cache", "gradio"} <= set(names)
    assert printed["ok"] is (done.returncode == 0)

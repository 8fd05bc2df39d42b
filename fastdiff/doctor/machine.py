"""The machine: its cards and driver, torch, Triton, and how fastdiff runs on it."""

import os
import platform
import sys
import warnings
from dataclasses import dataclass

import torch

import fastdiff
from fastdiff.doctor.finding import Finding
from fastdiff.doctor.packages import version_of
from fastdiff.kernels.host.launching import capability
from fastdiff.kernels.plans.verdict import driver_version

# How fastdiff runs on each platform; the README has the same table.
PLATFORMS = {
    "CUDA": "Triton kernels on the card, and torch functions for shapes without a kernel",
    "CUDA without Triton": "torch functions on the card; slower, and not measured",
    "ROCm": "untested; --device cpu runs torch functions",
    "MPS": "torch functions on the CPU; fastdiff does not use the Apple GPU",
    "CPU": "torch functions on the CPU",
}


@dataclass(frozen=True)
class Machine:
    """The cards, versions and driver of this machine, as torch and the driver report them."""

    cards: tuple[str, ...]  # names of the cards that torch sees
    device: torch.device  # the device of `--device auto`
    driver: str | None  # NVIDIA's
    triton: str | None
    problem: str = ""  # torch's warning about the cards
    cuda: str | None = None  # the version that torch was built with
    hip: str | None = None
    has_mps: bool = False

    @classmethod
    def look(cls) -> "Machine":
        """Ask torch and the driver."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            cards = tuple(torch.cuda.get_device_name(i) for i in range(count))
        return cls(
            cards,
            torch.device("cuda" if cards else "cpu"),
            driver_version(),
            version_of("triton"),
            " ".join(str(said[0].message).split())[:200] if said else "",
            torch.version.cuda,
            torch.version.hip,
            torch.backends.mps.is_available(),
        )

    @property
    def platform(self) -> str:
        """The platform's name in PLATFORMS."""
        if self.hip is not None:
            return "ROCm"
        if self.cards:
            return "CUDA" if self.triton else "CUDA without Triton"
        return "MPS" if self.has_mps else "CPU"


def findings(machine: Machine) -> list[Finding]:
    """Return findings about versions, cards, torch and Triton."""
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    text = f"{fastdiff.__version__}, Python {platform.python_version()}, {system}"
    values = {"version": fastdiff.__version__, "python": platform.python_version(), "system": platform.platform()}
    return [
        Finding("fastdiff", text, values=values),
        _card(machine),
        Finding("driver", machine.driver or "no NVIDIA driver found", values={"driver": machine.driver}),
        _torch(machine),
        _triton(machine),
        Finding("runs", f"{machine.platform}: {PLATFORMS[machine.platform]}", values={"platform": machine.platform}),
    ]


def _card(machine: Machine) -> Finding:
    if machine.cards:
        described = [_described(i, name) for i, name in enumerate(machine.cards)]
        return Finding("card", "; ".join(described), values={"cards": list(machine.cards)})
    none: dict[str, list[str]] = {"cards": []}
    if machine.driver is None:
        return Finding("card", "none that torch can use" if machine.has_mps else "none", values=none)
    text = "there is an NVIDIA driver, but torch sees no card" + (f" ({machine.problem})" if machine.problem else "")
    remedy = "check whether nvidia-smi lists a card, and whether CUDA_VISIBLE_DEVICES hides it"
    if machine.cuda is None:
        text, remedy = f"{text}: torch is built without CUDA", "install torch for CUDA from https://pytorch.org"
    return Finding("card", text, remedy, none)


def _described(index: int, name: str) -> str:
    device = torch.device("cuda", index)
    memory = torch.cuda.get_device_properties(device).total_memory
    return "{}, sm_{}{}, {:.0f} GiB".format(name, *capability(device), memory / 2**30)


def _torch(machine: Machine) -> Finding:
    cudnn = torch.backends.cudnn.version() if machine.cuda else None
    built = f"CUDA {machine.cuda}, cuDNN {cudnn}" if machine.cuda else "without CUDA"
    built = f"ROCm {machine.hip}" if machine.hip else built
    values = {"torch": str(torch.__version__), "cuda": machine.cuda, "cudnn": cudnn, "hip": machine.hip}
    return Finding("torch", f"{torch.__version__}, {built}", values=values)


def _triton(machine: Machine) -> Finding:
    values = {"triton": machine.triton}
    if machine.triton:
        return Finding("triton", machine.triton, values=values)
    if machine.platform == "CUDA without Triton" and sys.platform == "linux":
        return Finding("triton", "not installed, so no kernel runs on the card", "pip install triton", values)
    return Finding("triton", "not installed, and not needed here", values=values)

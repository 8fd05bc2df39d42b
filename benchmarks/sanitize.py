"""Run compute-sanitizer over the tests of every kernel, on a few shapes each, mostly odd ones.

    python benchmarks/sanitize.py [--save [DIR]]

memcheck finds accesses outside of a tensor, because torch's memory caching is off here. racecheck finds unsynchronised
accesses of a program's threads to shared memory. Only our kernels are watched. Needs a GPU and compute-sanitizer.
Prints the commands and findings, and with `--save` writes them to benchmarks/results/compute-sanitizer.txt. The exit
code is 1 if anything was found or a test fails. racecheck runs each test in its own process, because an internal error
of racecheck at some kernels kills the process; the log names these tests. In Gluon kernels racecheck reports a false
hazard: Triton hands warps their functions by a store, a barrier of all threads and a load, all at the line of the
kernel's name. The log counts these separately.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.operations import kernel_modules
from benchmarks.harness.reports import machine, save_folder
from fastdiff.tuning.timing import DEVICE

ROOT = Path(__file__).parents[1]
# Odd shapes with both ways of loading, and the smallest shape of each case that only even shapes reach.
SHAPES = "odd or N2-H8-C64-temb or C64-down-ddpm or H8-C64-up or H4-C or several-blocks or tiles-merged"
SELECTION = (
    f"(fp16 and (test_output or test_shapes or test_pair or test_norm or references_bits or on_hopper) and ({SHAPES})"
    " and not C224-H96) or draws_the_references_noise"
)
PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*/compute-sanitizer")
FOUND = "9"  # the exit code of a tool that finds something
LINES = 20  # of a tool's output that are kept per process
GLUON = ROOT / "kernels" / "device" / "hopper"
ACCESS = r"=+ +(?:Write|Read) Thread \(\S+ at (\w+)\+\w+ in (\S+:\d+)\n"
HAZARD = re.compile(rf"=+ Error: (Potential \w+ hazard) .*\n{ACCESS}{ACCESS}(?:=+ +Current Value.*\n)?(?:=+ *\n)?")
WORKERS = 8  # parallel processes


class Finding(NamedTuple):
    """The output of a tool in one process, and the tests that it watched."""

    tests: list[str]
    command: str
    lines: list[str]
    clean: bool
    broke_off: bool
    handed_over: int  # false hazards: Triton hands the warps of Gluon kernels their functions


class Hazard(NamedTuple):
    """Two accesses that racecheck finds unordered, with the kernel, file and line of each."""

    kind: str
    kernel: str
    place: str
    kernel2: str
    place2: str

    def is_hand_over(self) -> bool:
        """Return whether both accesses are at the line of a Gluon kernel's name."""
        file, line = self.place.split(":")
        source = GLUON / file
        if self.place != self.place2 or not source.exists():
            return False
        return source.read_text(encoding="utf-8").splitlines()[int(line) - 1].startswith(f"def {self.kernel}(")


def main() -> int:
    if DEVICE.type != "cuda":
        print("compute-sanitizer needs a GPU")
        return 0
    sanitizer, tests = find_sanitizer(), selected_tests()
    with ThreadPoolExecutor(WORKERS) as pool:
        memory = pool.submit(check, sanitizer, "memcheck", tests)
        races = list(pool.map(lambda test: check(sanitizer, "racecheck", [test]), tests))
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.splitlines()[-1]
    setting = ", ".join(f"{key} {value}" for key, value in machine().items())
    text = "\n\n".join([f"compute-sanitizer {version}, {setting}", summary([memory.result()]), summary(races)]) + "\n"
    folder = save_folder()
    if folder is not None:
        Path(folder, "compute-sanitizer.txt").write_text(text)
    print(text)
    return 0 if all(found.clean or found.broke_off for found in (memory.result(), *races)) else 1


def find_sanitizer() -> str:
    folders = [os.environ.get("PATH", ""), *(folder for place in PLACES for folder in glob.glob(place))]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        raise SystemExit("compute-sanitizer is not installed; install the CUDA toolkit, which includes it")
    return found


def selected_tests() -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-k", SELECTION, "tests/kernels"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "::" in line]


def check(sanitizer: str, tool: str, tests: list[str]) -> Finding:
    watched = [argument for name in kernel_modules() for argument in ("--kernel-name", f"kne={name}")]
    # pytest may take long to reach CUDA; Triton's compiler is a separate process, which needs no watching; torch and
    # Triton probe CUDA with calls whose API errors are expected
    waiting = ["--launch-timeout", "0", "--target-processes", "application-only"]
    errors = ["--report-api-errors", "no", "--error-exitcode", FOUND]
    values = ["--racecheck-report", "all"] if tool == "racecheck" else []  # includes the written values
    options = ["--tool", tool, *values, *waiting, *errors, "--show-backtrace", "no", "--print-limit", "0"]
    pytest = ["-m", "pytest", "-q", "-W", "default"]
    done = subprocess.run(
        [sanitizer, *options, *watched, sys.executable, *pytest, *tests],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    hazards = Counter(Hazard(*found) for found in HAZARD.findall(done.stdout))
    handed_over = sum(count for hazard, count in hazards.items() if hazard.is_hand_over())
    output = HAZARD.sub("", done.stdout)
    said = [line for line in output.splitlines() if re.match(r"(\.|F)*=========( |$)", line)]
    passed = re.findall(r"^\d+ \w+.* in [\d.]+s", output, re.MULTILINE)
    harmless = handed_over == hazards.total() > 0 and not re.search("Error|failed", "".join([*passed, *said]))
    said += [f"{count} times {' '.join(hazard)}" for hazard, count in hazards.items()]
    command = " ".join(["compute-sanitizer", *options, "--kernel-name ...", "python", *pytest, "TESTS"])
    clean = (done.returncode == 0 or harmless) and "SUMMARY" in output
    broke_off = "Internal Sanitizer Error" in output
    lines = [*passed, *said] or output.splitlines()[-1:]  # why it did not run
    return Finding(tests, command, lines, clean, broke_off, handed_over)


def summary(findings: list[Finding]) -> str:
    """Return the command, and its findings about the tests of its processes."""
    clean = [found for found in findings if found.clean]
    lines = [f"$ {findings[0].command}", f"nothing found in {sum(len(found.tests) for found in clean)} tests:"]
    for found in clean:
        handed_over = f" (but {found.handed_over} times Triton's hand-over to warps)" if found.handed_over else ""
        lines += [f"    {test}{handed_over}" for test in found.tests]
    for found in findings:
        if not found.clean:
            what = "the tool broke off at" if found.broke_off else "FOUND in"
            kept = found.lines if len(found.lines) <= LINES else [*found.lines[: LINES - 1], "...", found.lines[-1]]
            lines += [f"{what} {', '.join(found.tests)}:", *(f"    {line}" for line in kept)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""compute-sanitizer over the tests of every kernel, on a few shapes each, odd ones before all.

    python benchmarks/sanitize.py [--save [DIR]]

memcheck finds accesses outside of a tensor, as torch caches no memory here; racecheck finds threads of a program that
meet in its shared memory without a barrier. Only our kernels are watched. Needs a GPU and CUDA's compute-sanitizer.
Prints what was run and found, and with `--save` writes it to benchmarks/results/compute-sanitizer.txt; exit code 1
where anything was found, or a test fails.
"""

import glob
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton
from harness import DEVICE, machine, save_folder

import fastdiff.kernels

TOOLS = ("memcheck", "racecheck")
ROOT = Path(__file__).parents[1]
# Odd shapes by both ways of loading, and the smallest shape of what only even ones reach.
SHAPES = "odd or N2-H8-C64-temb or C64-down-ddpm or H8-C64-up or H4-C or several-blocks or tiles-merged"
# racecheck breaks off, by an error of its own, at programs that take nearly all of the shared memory.
LEFT_OUT = {"racecheck": "C1024"}
SELECTION = (
    f"(fp16 and (test_output or test_shapes or test_pair or references_bits) and ({SHAPES}) and not C224-H96)"
    " or draws_the_references_noise"
)
PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*/compute-sanitizer")
FOUND = "9"  # the exit code where a tool finds something
LINES = 60  # kept of what a tool says


def main() -> int:
    if DEVICE.type != "cuda":
        print("compute-sanitizer needs a GPU")
        return 0
    sanitizer = find_sanitizer()
    with ThreadPoolExecutor() as pool:
        reports, clean = zip(*pool.map(lambda tool: check(sanitizer, arguments(tool)), TOOLS), strict=True)
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.splitlines()[-1]
    setting = ", ".join(f"{key} {value}" for key, value in machine().items())
    text = "\n\n".join([f"compute-sanitizer {version}, {setting}", *reports]) + "\n"
    folder = save_folder()
    if folder is not None:
        Path(folder, "compute-sanitizer.txt").write_text(text)
    print(text)
    return 0 if all(clean) else 1


def find_sanitizer() -> str:
    folders = [os.environ.get("PATH", ""), *(folder for place in PLACES for folder in glob.glob(place))]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        raise SystemExit("compute-sanitizer is not installed; it comes with CUDA's toolkit")
    return found


def arguments(tool: str) -> list[str]:
    """compute-sanitizer's, for the selected tests."""
    watched = [argument for name in kernel_names() for argument in ("--kernel-name", f"kne={name}")]
    # no limit to the seconds before pytest gets to CUDA; Triton's compiler is a process of its own; torch and Triton
    # ask CUDA questions that it answers by errors, which are none
    waiting = ["--launch-timeout", "0", "--target-processes", "application-only"]
    errors = ["--report-api-errors", "no", "--error-exitcode", FOUND]
    selection = f"({SELECTION}) and not ({LEFT_OUT[tool]})" if tool in LEFT_OUT else SELECTION
    tests = ["python", "-m", "pytest", "-q", "-W", "default", "-k", selection, "tests/kernels"]
    return ["--tool", tool, *waiting, *errors, *watched, *tests]


def kernel_names() -> list[str]:
    """Of every function that Triton compiles: a kernel has that of its function."""
    stems = [module.name for module in pkgutil.iter_modules(fastdiff.kernels.__path__)]
    modules = [importlib.import_module(f"fastdiff.kernels.{stem}") for stem in stems]
    values = [value for module in modules for value in vars(module).values()]
    return sorted({value.__name__ for value in values if isinstance(value, triton.JITFunction)})


def check(sanitizer: str, arguments: list[str]) -> tuple[str, bool]:
    """What a tool ran and said, and whether it found nothing in tests that passed."""
    done = subprocess.run(
        [sanitizer, *(sys.executable if argument == "python" else argument for argument in arguments)],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return summary(arguments, done.stdout), done.returncode == 0 and "SUMMARY" in done.stdout


def summary(arguments: list[str], output: str) -> str:
    """The command, pytest's last line and what failed, and what the tool says."""
    lines = output.splitlines()
    said = [line for line in lines if line.startswith("=========")]
    tests = [line for line in lines if re.search(r"^(E  |FAILED)|\d+ \w+ in [\d.]+s", line)]
    left_out = [f"... {len(said) - LINES} lines ...", said[-1]] if len(said) > LINES else []
    command = " ".join(f"'{argument}'" if " " in argument else argument for argument in arguments)
    return "\n".join([f"$ compute-sanitizer {command}", *(tests or lines)[-LINES:], *said[:LINES], *left_out])


if __name__ == "__main__":
    sys.exit(main())

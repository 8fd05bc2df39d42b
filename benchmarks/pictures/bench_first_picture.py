"""From the start of a process to its first PNG, with and without the kernels in Triton's cache.

    python benchmarks/pictures/bench_first_picture.py [WORKLOAD ...] [--save [DIR]]

A workload is a pipeline of `text_folders` with random weights. `fastdiff sample` draws one picture of the model's own
size, in a process of its own, on the GPU:

    cold       Triton's cache is empty
    warmed     by a cache that `fastdiff warm --card` filled, in a process that sees no GPU
    again      by the cache that the cold process left
    warm       the seconds that `fastdiff warm` took

Times are in seconds, the least of ROUNDS processes; each cold process has a cache of its own. `compiled_*` counts the
kernels that a process compiled itself; its worker processes compile more. The files of the model are in the
page cache: the benchmark has just written them.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.reports import chosen, environment, needs_gpu, report
from benchmarks.pictures.text_folders import PIPELINES, save_folder
from fastdiff.tuning.timing import DEVICE

ROUNDS, STEPS = 2, 30
# The command. It ends with a line that says how many kernels it compiled.
COMMAND = """
import sys, triton
compiled = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.name)
from fastdiff.cli import main
code = main()
print("compiled", len(compiled), file=sys.stderr)
sys.exit(code)
"""


def main() -> None:
    needs_gpu()
    report("first_picture", rows(chosen(PIPELINES)), by=("workload", "triton"))


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        with tempfile.TemporaryDirectory() as root:
            yield {"workload": name, **measure(name, Path(root))}


def measure(name: str, root: Path) -> dict[str, float]:
    """Return the times and counts of a pipeline, whose folder and caches are made in `root`."""
    model = root / "model"
    save_folder(name, model, lambda pipe, latents: latents)  # the reference picture is not needed
    torch.cuda.empty_cache()
    major, minor = torch.cuda.get_device_capability(DEVICE)
    card = ["warm", "--model", model, "--card", f"sm_{major}{minor}"]
    seconds, _ = run(card, root / "warmed", CUDA_VISIBLE_DEVICES="")
    draw = ["sample", "--model", model, "--prompt", "a cat", "--num-images", 1, "--steps", STEPS, "--overwrite"]
    draw += ["-o", root / "out.png"]
    caches = {
        "cold": [root / f"cold-{number}" for number in range(ROUNDS)],
        "warmed": [root / "warmed"] * ROUNDS,
        "again": [root / "cold-0"] * ROUNDS,
    }
    row = {"warm": seconds}
    for what, folders in caches.items():
        times, compiled = zip(*(run(draw, folder) for folder in folders), strict=True)
        row |= {what: min(times), f"compiled_{what}": compiled[0]}
    return row


def run(arguments: list[Any], cache: Path, **variables: str) -> tuple[float, int]:
    """Run `fastdiff` with these arguments and this cache. Return its seconds, and the kernels that it compiled."""
    variables = environment() | {"TRITON_CACHE_DIR": str(cache)} | variables
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    start = time.perf_counter()
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    found = re.search(r"^compiled (\d+)$", done.stderr, re.MULTILINE)
    if done.returncode or found is None:
        raise SystemExit(f"{' '.join(command[3:])} failed:\n{done.stderr}")
    return seconds, int(found[1])


if __name__ == "__main__":
    main()

"""From the start of a process to its first PNG with a single file of Stable Diffusion XL, and the host memory it takes.

    python benchmarks/pictures/bench_single_file.py [--save [DIR]]

The file has random weights in float16 by the names of LDM, 6.9 GB, and is in the page cache: the benchmark has just
written it. `fastdiff sample` draws one picture of 1024x1024 on the GPU, in a process of its own, ROUNDS times. The
first process compiles the kernels; the others find them in Triton's cache.

    cold, again    seconds, of the first process and the least of the others
    memory         GB of host memory at its peak, without the pages of files, which the page cache holds anyway
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.reports import environment, needs_gpu, report
from benchmarks.pictures.text_folders import random_pipeline
from tests.checkpoints.single_files.ldm import save, whole

ROUNDS, STEPS = 3, 30
INTERVAL = 0.02  # seconds between two looks at the memory


def main() -> None:
    needs_gpu()
    report("single_file", rows(), by=("workload", "triton"))


def rows() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as root:
        yield {"workload": "sdxl", **measure(Path(root))}


def measure(root: Path) -> dict[str, float]:
    """Return the times and the memory of a file that is written into `root`."""
    file = save(whole("sdxl", random_pipeline("sdxl", root / "bytes")), root / "model.safetensors", dtype=torch.float16)
    torch.cuda.empty_cache()
    first, *others = [draw(file, root / f"{number}.png", root / "cache") for number in range(ROUNDS)]
    return {
        "gigabytes": file.stat().st_size / 1e9,
        "cold": first[0],
        "again": min(seconds for seconds, _ in others),
        "memory": max(peak for _, peak in [first, *others]),
    }


def draw(file: Path, picture: Path, cache: Path) -> tuple[float, float]:
    """Draw one picture in a process. Return its seconds, and its peak of memory in GB."""
    command = [sys.executable, "-m", "fastdiff", "sample", "--model", file, "--prompt", "a cat", "--num-images", 1]
    command += ["--steps", STEPS, "-o", picture]
    variables = environment() | {"TRITON_CACHE_DIR": str(cache)}
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*map(str, command)], env=variables, stdout=said, stderr=said)
        while process.poll() is None:
            peak = max(peak, own_memory(process.pid))
            time.sleep(INTERVAL)
        seconds = time.perf_counter() - start
        if process.returncode or not picture.exists():
            said.seek(0)
            raise SystemExit(f"fastdiff sample failed:\n{said.read()}")
    return seconds, peak / 1e9


def own_memory(process: int) -> int:
    """Return the bytes of a process that no file backs. 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


if __name__ == "__main__":
    main()

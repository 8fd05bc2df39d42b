"""Whole pictures from prompt to PNG, against diffusers: Stable Diffusion 1.5 (50 steps) and XL (30), in bfloat16.

    python benchmarks/pictures/bench_text_to_image.py [WORKLOAD ...] [--save [DIR]]

A workload is a model and an implementation. Each runs in its own process with empty caches of Triton and torch.compile;
`pictures_alone.py` defines the results. The models have random weights and are saved for the run; they need 3 and 8 GB
of disk space.
"""

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.reports import chosen, environment, needs_gpu, report
from benchmarks.pictures.pictures_alone import REFERENCE, WAYS, draw_reference, of_diffusers
from benchmarks.pictures.text_folders import PIPELINES, save_folder

STEPS = {"sd15": 50, "sdxl": 30}
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
WORKLOADS = {f"{name}-{who}": (name, who) for name in PIPELINES for who in WAYS}


def main() -> None:
    needs_gpu()
    torch.backends.cudnn.allow_tf32 = False  # errors are measured against float32
    report("text_to_image", rows(chosen(WORKLOADS)))


def rows(workloads: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of workloads, model by model."""
    for name in PIPELINES:
        wanted = [workload for workload in workloads if WORKLOADS[workload][0] == name]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            if wanted:
                make_folder(name, Path(folder))
            for workload in wanted:
                yield {"workload": workload} | in_new_process(WORKLOADS[workload][1], folder, STEPS[name])


def make_folder(name: str, folder: Path) -> None:
    """Save a pipeline, and with it the picture that float32 makes of some noise; then free the GPU's memory."""
    reference = save_folder(name, folder, lambda pipe, latents: draw_reference(of_diffusers(pipe), latents))
    torch.save(tuple(reference), folder / REFERENCE)
    gc.collect()
    torch.cuda.empty_cache()


def in_new_process(who: str, folder: str, steps: int) -> dict[str, float]:
    """Run `pictures_alone.py` with empty caches."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        caches = {variable: str(Path(cache, variable)) for variable in CACHES}
        command = [sys.executable, str(Path(__file__).with_name("pictures_alone.py")), who, folder, str(steps)]
        command.append(repr(time.time()))
        said = subprocess.run(command, env=environment() | caches, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


if __name__ == "__main__":
    main()

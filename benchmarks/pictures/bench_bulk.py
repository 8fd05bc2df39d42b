"""Many pictures on 1 and 2 GPUs: `fastdiff bulk` against a loop over diffusers and accelerate, eager and compiled.

    python benchmarks/pictures/bench_bulk.py [WORKLOAD ...] [--save [DIR]]

A workload's name is the model, the implementation and the number of GPUs: ddpm32-fastdiff-1, sdxl-compile-2. All draw
in bfloat16 and write PNGs. The models have random weights and are saved for the run (sd15 and sdxl take 3 and 8 GB),
except emoji64, which is bundled.

    pictures_s         pictures per second of all GPUs, after each has finished its first shard (loops: two batches)
    of_linear          2 GPUs: their pictures_s over twice the pictures_s of one GPU, if both were measured
    busy               fastdiff only: seconds of steps by the GPU's events, over the measured seconds x GPUs
    first_s, wall_s    fastdiff only: from the start of the command to the first shard on disk, and to the end
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.reports import chosen, environment, report
from benchmarks.pictures.bulk_folders import TASKS, folder_of
from benchmarks.pictures.bulk_loops import WARM
from fastdiff.checkpoints.model_card import ModelCard

HERE = Path(__file__).parent
ENVIRONMENT = environment() | {"OMP_NUM_THREADS": "1"}  # else torchrun warns about threads
WAYS = ("fastdiff", "eager", "compile")
CARDS = (1, 2)
SECONDS = 8.0  # drawn by the loops after their warm-up
WORKLOADS = {f"{name}-{who}-{cards}": (name, who, cards) for name in TASKS for who in WAYS for cards in CARDS}


def main() -> None:
    there = max(1, torch.cuda.device_count())
    report("bulk", rows([name for name in chosen(WORKLOADS) if WORKLOADS[name][2] <= there]))


def rows(workloads: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of workloads, model by model."""
    of_one: dict[tuple[str, str], float] = {}
    for name in TASKS:
        own = [workload for workload in workloads if WORKLOADS[workload][0] == name]
        if not own:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            folder = folder_of(name, Path(root, "model"))
            for workload in own:
                _, who, cards = WORKLOADS[workload]
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as out:
                    row = (bulk if who == "fastdiff" else loop)(name, who, cards, folder, Path(out))
                if cards == 1:
                    of_one[name, who] = row["pictures_s"]
                elif (name, who) in of_one:
                    row["of_linear"] = row["pictures_s"] / cards / of_one[name, who]
                yield {"workload": workload} | row


def bulk(name: str, who: str, cards: int, folder: Path, out: Path) -> dict[str, float]:
    """Return the results of `fastdiff bulk`."""
    task = TASKS[name]
    groups = ModelCard.read(name, folder).info.label_groups  # all are drawn equally often
    per_subject = task.pictures * cards // max(1, len(groups))
    flags = ["--num-images", per_subject, "--batch-size", task.batch, "--shard-size", task.batch, "--workers", cards]
    flags += ["--steps", task.steps, "--cfg-scale", task.guidance] + (["--prompt", task.prompt] if task.prompt else [])
    command = [sys.executable, "-m", "fastdiff", "bulk", "-m", folder, "--out", out / "run", *flags]
    start = time.time()
    subprocess.run([*map(str, command)], env=ENVIRONMENT, check=True)
    shards = [(path.stat().st_mtime, json.loads(path.read_text())) for path in (out / "run/shards").glob("??????.json")]
    first = {record["worker"]: at for at, record in sorted(shards, key=lambda shard: shard[0], reverse=True)}
    if len(first) < cards:
        raise SystemExit(f"{name}: only {len(first)} of {cards} workers have drawn")
    warm, end = max(first.values()), max(at for at, _ in shards)
    after = [record for at, record in shards if at > warm]
    busy = [record["gpu_seconds"] for record in after if record["gpu_seconds"] is not None]
    return {
        "pictures_s": sum(record["count"] for record in after) / (end - warm),
        "busy": sum(busy) / (end - warm) / cards if busy else None,
        "first_s": min(first.values()) - start,
        "wall_s": time.time() - start,
        "pictures": sum(record["count"] for _, record in shards),
    }


def loop(name: str, who: str, cards: int, folder: Path, out: Path) -> dict[str, float]:
    """Return the results of a loop over diffusers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", cards]
    command += [HERE / "bulk_loops.py", who, name, folder, out, SECONDS]
    done = subprocess.run([*map(str, command)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    batches = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rate = 0.0
    for rank in range(cards):
        own = [batch for batch in batches if batch["rank"] == rank]
        seconds = own[-1]["at"] - own[WARM - 1]["at"]
        rate += sum(batch["count"] for batch in own[WARM:]) / seconds
    return {"pictures_s": rate, "pictures": sum(batch["count"] for batch in batches)}


if __name__ == "__main__":
    main()

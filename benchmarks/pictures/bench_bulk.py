"""Many pictures on 1 and 2 cards: `fastdiff bulk` beside a loop over diffusers and accelerate, and its compiled twin.

    python benchmarks/pictures/bench_bulk.py [WORKLOAD ...] [--save [DIR]]

A workload is a model, who draws, and the number of cards: ddpm32-fastdiff-1, sdxl-compile-2. All write PNGs; bfloat16.
The folders are of random weights, made for the run (sd15 and sdxl take 3 and 8 GB), but for emoji64, which is bundled.

    pictures_s         pictures a second, of all cards, once each has ended its first shard (of the loops, two batches)
    of_linear          of 2 cards: their pictures_s over twice the pictures_s of one, where both were measured
    busy               of ours: the seconds in which steps ran by the GPU's own events, over those seconds x cards
    first_s, wall_s    of ours: from the command to the first shard on the disk, and to the end of all
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
ENVIRONMENT = environment() | {"OMP_NUM_THREADS": "1"}  # so that torchrun says nothing of threads
WAYS = ("fastdiff", "eager", "compile")
CARDS = (1, 2)
SECONDS = 8.0  # that the loops draw once they are warm
WORKLOADS = {f"{name}-{who}-{cards}": (name, who, cards) for name in TASKS for who in WAYS for cards in CARDS}


def main() -> None:
    there = max(1, torch.cuda.device_count())
    report("bulk", rows([name for name in chosen(WORKLOADS) if WORKLOADS[name][2] <= there]))


def rows(workloads: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of workloads, model by model."""
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
    """The numbers of `fastdiff bulk`."""
    task = TASKS[name]
    groups = ModelCard.read(name, folder).info.label_groups  # each is drawn as often as the others
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
    """The numbers of a loop over diffusers."""
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

"""Draw 5,000 tiny pictures with 20 SIGKILLs of one or all workers: every picture exists once, with the same bits.

    python -m tests.bulk.soak [--pictures N] [--kills N] [--workers N ...] [--model DIR] [--flags "..."] [--save [FILE]]

The first run is undisturbed, with one worker. Then a run with each number of workers is killed at random moments: at
random, either one worker, or all workers and their launcher. When no process is left, the same command runs again. At
the end, the hashes of all shards and pixels are compared, every shard is verified, and leftover files are searched.
With --save, the result is kept in benchmarks/results/soak.json or another file. On GPUs:

    python benchmarks/pictures/bulk_folders.py ddpm32 /tmp/ddpm32
    python -m tests.bulk.soak --pictures 50000 --kills 6 --workers 1 2 --model /tmp/ddpm32 --flags "--steps 50" \\
        --save FILE
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import fastdiff
from fastdiff.bulk.attempts import Attempts
from fastdiff.bulk.claims import read_leases
from fastdiff.bulk.folder import Record, data_sha256
from tests.bulk.soak.killing import children, kill, kill_all

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "soak.json"
LONGEST = 3600.0  # limit of a run in seconds
SHARE = 0.6  # upper limit of the time between kills, scaled so that all kills happen before the run is done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--model", help="(default: a tiny model with random weights)")
    parser.add_argument("--flags", default="--steps 2 --device cpu", help="more flags for fastdiff bulk")
    parser.add_argument("--save", nargs="?", type=Path, const=RESULT, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(args, Path(folder))
    print(json.dumps(result, indent=1))
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if result["equal"] else 1)


def soak(args: argparse.Namespace, folder: Path) -> dict:
    """Do all runs and return the results."""
    model = args.model or save_tiny(folder / "model")
    command = ["-m", model, "--num-images", args.pictures, *shlex.split(args.flags)]
    command = [sys.executable, "-m", "fastdiff", "bulk", *map(str, command)]
    start = time.perf_counter()
    subprocess.run([*command, "--workers", "1", "--out", folder / "whole"], check=True)
    alone = time.perf_counter() - start
    whole = read(folder / "whole")
    runs = {}
    for workers in args.workers:
        out, start = folder / f"killed-{workers}", time.perf_counter()
        killed = draw_with_kills([*command, "--workers", str(workers), "--out", out], out, args, alone)
        faults = find_faults(out, args.pictures)
        seconds, equal = round(time.perf_counter() - start, 1), read(out) == whole
        runs[f"{workers} workers"] = {"killed": killed, "seconds": seconds, "equal": equal, "faults": faults}
    return {
        "equal": all(run["equal"] and not run["faults"] for run in runs.values()),
        "pictures": args.pictures,
        "shards": len(whole),
        "pixels_sha256": hashlib.sha256("".join(pixels for _, pixels in whole.values()).encode()).hexdigest(),
        "undisturbed": {"workers": 1, "seconds": round(alone, 1)},
        "runs": runs,
        "seed": args.seed,
        "flags": args.flags,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {"fastdiff": fastdiff.__version__, "torch": torch.__version__},
    }


def draw_with_kills(command: list, folder: Path, args: argparse.Namespace, alone: float) -> dict[str, int]:
    """Run a command until it finishes by itself, and kill it at random moments until enough kills are done."""
    chance, killed = random.Random(args.seed), {"one worker": 0, "all": 0}
    deadline = time.monotonic() + LONGEST
    launcher = subprocess.Popen(command)
    while time.monotonic() < deadline:
        is_last = sum(killed.values()) == args.kills
        if not is_last and launcher.poll() is None and not read_leases(folder / "shards"):
            time.sleep(0.05)  # until a worker draws
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(LONGEST if is_last else chance.uniform(0, SHARE * alone / args.kills))
        if launcher.poll() == 0:
            return killed
        if launcher.poll() is None:
            workers = children(launcher.pid)
            if workers and chance.random() < 0.5:
                kill(chance.choice(workers))
                killed["one worker"] += 1
            else:
                kill_all(launcher)
                killed["all"] += 1
        if launcher.poll() is not None:
            launcher = subprocess.Popen(command)
    kill_all(launcher)
    raise SystemExit(f"not done after {LONGEST:.0f} s")


def read(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the hashes of each shard."""
    found = {path.stem: Record.read(path) for path in sorted((folder / "shards").glob("??????.json"))}
    return {name: (record.sha256, record.pixels_sha256) for name, record in found.items() if record is not None}


def find_faults(folder: Path, pictures: int) -> list[str]:
    """Return a line for each missing, damaged or leftover file."""
    faults = [f"{name} was given up: {why}" for name, why in Attempts(folder / "shards").given_up().items()]
    for name, (sha256, _) in read(folder).items():
        if data_sha256(folder / name) != sha256:
            faults.append(f"{name} is not what its JSON file says")
    names = [path.name for path in folder.rglob("*.png")]
    if sorted(names) != [f"{i:06d}.png" for i in range(pictures)]:
        faults.append(f"{len(names)} pictures, {len(set(names))} different, of {pictures}")
    known = {"plan.json", "shards", *read(folder)}
    faults += [f"{path.name} is left over" for path in folder.iterdir() if path.name not in known]
    faults += [f"{path.name} is left over" for path in (folder / "shards").glob("*.attempts.json")]
    return faults


def save_tiny(folder: Path) -> Path:
    """Save a tiny U-Net with random weights, 8 x 8."""
    from tests.support.tiny import UNET, save_unet

    return save_unet(folder, **UNET)


if __name__ == "__main__":
    main()

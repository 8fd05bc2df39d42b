"""Forwards of the bundled models' sizes on a CPU: fastdiff beside what a user would pick instead.

    python benchmarks/models/bench_cpu.py [WORKLOAD ...] [--save [DIR]]

It needs onnxruntime, openvino, onnx and onnxscript, which no other part of the project does. A workload is a model, a
batch and a number of threads, such as `emoji64_b1_t2`. The peers are in `cpu_peers.py`. Each has a process of its own:
fastdiff in float32 and bfloat16; diffusers eager, channels-last, and under torch.compile (inductor with freezing,
channels-last); ONNX Runtime and OpenVINO with the model exported from diffusers, in float32.

    *_ms        a forward: the least of all, as other programs on the machine only add time. Peers take turns.
    *_first_s   from the start of the process to its first forward. torch.compile starts without a cache with two
                threads, and has the cache from then with one. `export_s` is the time of the export to ONNX.
    *_busy_ms   a forward beside a process that keeps one core busy: the median.
    *_err       the largest error, as a fraction of diffusers' largest output in float32.
    profile_*   the milliseconds of fastdiff's forward by class of torch's functions

`fastdiff` runs with GOMP_SPINCOUNT as the command sets it, `spinning` without.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_models import build
from benchmarks.harness.reports import chosen, environment, report
from benchmarks.models.cpu_peers import PEERS
from fastdiff.tuning.forwards import inputs
from fastdiff.tuning.models import EMOJI64, EMOJI_SD

MODELS = {
    "emoji64_b1": (EMOJI64, 1),
    "emoji-sd_b2": (EMOJI_SD, 2),
    "emoji64_b2": (EMOJI64, 2),
    "emoji64_b8": (EMOJI64, 8),
}
THREADS = (2, 1)
WORKLOADS = [f"{model}_t{threads}" for model in MODELS for threads in THREADS]
ROUNDS, SECONDS, BUSY_SECONDS = 6, 0.5, 2.0
SPINS = "10000"  # as `_wait_briefly` in fastdiff/cli sets it
NAMES = ("sample", "timesteps", "condition")


def main() -> None:
    names = chosen(WORKLOADS)
    report("cpu", rows(names), by=("workload",))


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    for model in dict.fromkeys(name.rpartition("_t")[0] for name in names):
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root)
            save_model(folder, *MODELS[model])
            export_s = export(folder)
            for name in [each for each in names if each.rpartition("_t")[0] == model]:
                yield {"workload": name, **where(), "export_s": export_s, **row(folder, int(name.rpartition("_t")[2]))}


def save_model(folder: Path, config: dict[str, Any], batch: int) -> None:
    """Save a model with random weights, its inputs, and what diffusers predicts in float32."""
    theirs, _ = build(config, torch.float32)
    theirs.save_pretrained(folder / "model")
    given = [each for each in inputs(config, batch) if each is not None]
    with torch.inference_mode():
        expected = theirs(*given).sample
    arrays = {name: each.numpy() for name, each in zip(NAMES, given, strict=False)}
    np.savez(folder / "inputs.npz", expected=expected.numpy(), **arrays)


def export(folder: Path) -> float:
    """Write the model as ONNX, and return the seconds."""
    start = time.perf_counter()
    subprocess.run(command("export", folder, 2), env=environment(), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def where() -> dict[str, Any]:
    """Return what a number depends on beside the versions that every report has."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    versions = {name: metadata.version(name) for name in ("onnxruntime", "openvino")}
    return {"cpu": models[0] if models else "unknown", "cores": os.cpu_count(), "load": os.getloadavg()[0], **versions}


def row(folder: Path, threads: int, peers: tuple[str, ...] = tuple(PEERS), rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the times and errors of a workload."""
    measured: dict[str, Any] = {}
    started: dict[str, Peer] = {}
    try:
        for name in peers:
            started[name] = peer = Peer(name, folder, threads)
            measured |= {f"{name}_first_s": peer.first_s, f"{name}_err": peer.error}
        times: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(rounds):
            for name, peer in started.items():
                times[name] += peer.ask(SECONDS)
        measured |= {f"{name}_ms": min(each) for name, each in times.items()}
        if "fastdiff" in started:
            measured |= {f"profile_{name}_ms": each for name, each in started["fastdiff"].ask("profile").items()}
        if threads > 1:
            with busy():
                for name, peer in started.items():
                    measured[f"{name}_busy_ms"] = statistics.median(peer.ask(BUSY_SECONDS))
    finally:
        for peer in started.values():
            peer.end()
    return measured


@contextmanager
def busy() -> Iterator[None]:
    """Keep one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def command(name: str, folder: Path, threads: int) -> list[str]:
    return [sys.executable, str(Path(__file__).parent / "cpu_peers.py"), name, str(folder), str(threads)]


class Peer:
    """A process of `cpu_peers.py`."""

    def __init__(self, name: str, folder: Path, threads: int):
        variables = environment() | {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
        variables.pop("GOMP_SPINCOUNT", None)
        if name in ("fastdiff", "bfloat16"):
            variables["GOMP_SPINCOUNT"] = SPINS
        start = time.perf_counter()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command(name, folder, threads), env=variables, stdin=pipe, stdout=pipe, text=True
        )
        self.error = self._answer()
        self.first_s = time.perf_counter() - start

    def ask(self, question: float | str) -> Any:
        """Send a line of input and return the answer."""
        assert self._process.stdin is not None
        print(question, file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line[:1] in "[{0123456789":  # libraries may print other lines
                return json.loads(line)
        self.end()
        raise SystemExit(f"{' '.join(map(str, self._process.args))} ended early")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

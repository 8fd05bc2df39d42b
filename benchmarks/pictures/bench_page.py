"""The page under load: many simultaneous users of two models, queued behind a long request that is cancelled.

    python benchmarks/pictures/bench_page.py [MODEL MODEL] [--save [DIR]]

A MODEL is a bundled name or a folder that diffusers saved; the default is emoji64 and a tiny Stable Diffusion with
random weights. Each user is a separate Gradio client, and the server is `fastdiff ui`. Every picture is compared, byte
for byte, with the PNG that `fastdiff sample` writes.

    pictures_s         pictures per second of all users together, from the cancellation to the last picture
    first_s            idle server with loaded models: from the call to the end of its first step
    cancel_s, next_s   from the cancellation to its reply, and to the end of the next user's first step
    wait_s, longest_s  from a user's call to the end of its first step: the median and the maximum
    memory, gpu        MB of the server's RAM and of the GPU's used memory, before the load (when both models have drawn
                       once) and after it
    wrong              pictures that are missing or differ from the command's
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gradio_client import Client  # type: ignore[import-untyped]

from benchmarks.harness.reports import command_line, environment, report
from fastdiff.checkpoints import hub
from fastdiff.tuning.timing import DEVICE

USERS = 20
PICTURES = 2  # per user
STEPS = 20
LONG = {"num_images": 32, "steps": 1000, "batch_size": 1}  # the request that is cancelled
QUEUING = 1.0  # seconds for all users to enter the queue
PROMPT = "a photo of a cat"


@dataclass(frozen=True)
class Drawn:
    """The pictures that a user received, with times in seconds."""

    called: float
    first: float  # the end of the first step
    ended: float
    pictures: list[tuple[str, bytes]]  # each file's name and contents


def main() -> None:
    report("page", rows(command_line().workload))


def rows(models: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the single row of a run with these models."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        folder = Path(root)
        names = [page_name(model, folder) for model in models or ["emoji64", tiny_stable_diffusion(folder / "tiny-sd")]]
        with serving(folder) as (address, process):
            row, drawn, asked = measure(names, address, process, folder / "downloads")
        expected = {path.name: path.read_bytes() for name in names for path in sample(name, asked[name], folder)}
    yield {"workload": " ".join(names), **row, "wrong": count_wrong(drawn, expected)}


def page_name(model: str, folder: Path) -> str:
    """Return the page's name for a model: a bundled model's own name, or that of a copy in `folder`."""
    if model in hub.bundled_models():
        return model
    path = Path(model).resolve()
    if path.parent != folder.resolve():
        shutil.copytree(path, folder / path.name)  # the server does not follow links out of its folder
    return f"./{path.name}"


def tiny_stable_diffusion(folder: Path) -> str:
    """Save a tiny Stable Diffusion with random weights, and return its folder."""
    from tests.support.text_pipelines import text_pipeline

    text_pipeline("sd1").save_pretrained(folder)
    return str(folder)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """Run `fastdiff ui` as a process inside the block; yield its address and process id."""
    flags = ["--port", "0", "--models-dir", folder, "--outputs", folder / "outputs"]
    with subprocess.Popen(command("ui", *flags), env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[3].rstrip("/,"), server.pid
        finally:
            server.terminate()


def measure(
    names: list[str], address: str, process: int, downloads: Path
) -> tuple[dict[str, Any], list[Drawn], dict[str, dict[str, Any]]]:
    """Return the results, what the users received, and the label or prompt for each model."""

    def connect() -> Client:
        return Client(address, verbose=False, download_files=downloads)

    with ThreadPoolExecutor(USERS) as pool:
        clients = [connect() for _ in range(USERS + 1)]
        asked = {each["name"]: subject(each) for each in clients[-1].predict(api_name="/models")}
        calls = [user_call(names, asked, user) for user in range(USERS)]
        *_, idle = [draw(clients[user], calls[user]) for user in (*range(len(names)), 0)]
        before = memory(process)
        long = clients[-1].submit(model=names[0], **asked[names[0]], **LONG, api_name="/generate")
        next(long)
        users = [pool.submit(draw, client, call) for client, call in zip(clients, calls, strict=False)]
        time.sleep(QUEUING)
        cancelled = time.monotonic()
        long.cancel()
        answered = time.monotonic()
        drawn = [user.result() for user in users]
        after = memory(process)
        for client in clients:
            client.close()
    waits = [each.first - each.called for each in drawn]
    row = {
        "users": USERS,
        "pictures_s": USERS * PICTURES / (max(each.ended for each in drawn) - cancelled),
        "first_s": idle.first - idle.called,
        "cancel_s": answered - cancelled,
        "next_s": min(each.first for each in drawn) - cancelled,
        "wait_s": statistics.median(waits),
        "longest_s": max(waits),
        **{f"{what}_before": value for what, value in before.items()},
        **{f"{what}_after": value for what, value in after.items()},
    }
    return row, drawn, asked


def subject(description: dict[str, Any]) -> dict[str, Any]:
    """Return the label or prompt to draw with a model, given its description from /models."""
    if description["reads_text"]:
        return {"prompt": PROMPT}
    return {"label": description["labels"][0]} if description["labels"] else {}


def user_call(names: list[str], asked: dict[str, dict[str, Any]], user: int) -> dict[str, Any]:
    """Return a user's options: users alternate between the models, and each model's seeds count up."""
    name = names[user % len(names)]
    seed = PICTURES * (user // len(names))
    return {"model": name, **asked[name], "seed": seed, "num_images": PICTURES, "steps": STEPS}


def draw(client: Client, options: dict[str, Any]) -> Drawn:
    called = time.monotonic()
    job = client.submit(**options, api_name="/generate")
    next(job)
    first = time.monotonic()
    pictures = [(Path(path).name, Path(path).read_bytes()) for path in job.result()]
    return Drawn(called, first, time.monotonic(), pictures)


def memory(process: int) -> dict[str, float]:
    """Return the MB that a process holds (on Linux only), and the GPU's used MB (if there is a GPU)."""
    held: dict[str, float] = {}
    status = Path(f"/proc/{process}/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        held["memory"] = int(lines["VmRSS"].split()[0]) / 1024
    if DEVICE.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        held["gpu"] = (total - free) / 2**20
    return held


def sample(name: str, asked: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the pictures that all users request of a model with `fastdiff sample`, and return its PNGs."""
    flags = ["--model", name, "--seed", "0", "--num-images", USERS * PICTURES, "--steps", STEPS]
    flags += [part for option, value in asked.items() for part in (f"--{option}", value)]
    out = folder / "expected" / Path(name).name
    subprocess.run(command("sample", *flags, "-o", out), env=environment(), cwd=folder, check=True)
    return list(out.iterdir())


def count_wrong(drawn: list[Drawn], expected: dict[str, bytes]) -> int:
    """Count the pictures that are missing or differ from `expected`."""
    right = sum(expected.get(name) == data for each in drawn for name, data in each.pictures)
    return USERS * PICTURES - right


def command(*parts: Any) -> list[str]:
    return [sys.executable, "-m", "fastdiff", *map(str, parts)]


if __name__ == "__main__":
    main()

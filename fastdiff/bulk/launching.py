"""Launch workers by torch.distributed.run, and run a worker from its start to its exit code.

torchrun starts one worker per GPU, and restarts them when one dies. Nothing else is distributed: workers share only
the folder.
"""

import contextlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.arguments import word
from fastdiff.bulk.attempts import Attempts
from fastdiff.bulk.fingerprint import take_fingerprint
from fastdiff.bulk.folder import Folder
from fastdiff.bulk.plan import Plan
from fastdiff.bulk.progress import Reader
from fastdiff.bulk.stopping import Stop, end_signals
from fastdiff.checkpoints.model_hash import begin_files_hash
from fastdiff.errors import InputError
from fastdiff.execution.cores import num_cores
from fastdiff.requests.defaults import SEED
from fastdiff.runs.notices import find_device_notices
from fastdiff.runs.option_files.kinds import files_of

if TYPE_CHECKING:
    import torch

REPORTS = "FASTDIFF_BULK_REPORTS"  # the folder where workers tell our own launcher why they ended
RESTARTS = 3  # of all workers, before the launcher checks for progress


@dataclass(frozen=True)
class LaunchOptions:
    """The options of a launch that do not change the pictures."""

    device: str = "auto"
    offload: bool = False
    allow_mixed: bool = False
    workers: int | None = None  # None: one per GPU, or one per CPU core


class Ended(Exception):
    """All workers ended, and a restart cannot help. The command ends with the exit code `code` and the error `line`."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(line)
        self.code, self.line = code, line


def is_worker() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ


def work(plan: Plan, folder: Folder, options: LaunchOptions, say: Callable[[str], None]) -> int:
    """Run a worker and return its exit code.

    Raises the errors of `Worker.work`, and InputError if the worker must not draw into the folder.

    say: prints a notice.
    """
    from fastdiff.bulk.worker import Stopped, Worker
    from fastdiff.pipelines import load_pipeline

    stop = Stop()
    stop.install()
    files = begin_files_hash(plan.run.card, plan.run.request.variant, files_of(plan.run.request))
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    device = _own_device(options.device)
    pipe = load_pipeline(
        plan.run.card, plan.run.request, str(device), offload=options.offload, names_loras=plan.run.names_loras
    )
    for line in find_device_notices(device) if os.environ.get("RANK") == "0" else ():
        say(line)
    fingerprint = take_fingerprint(pipe, files.result())
    folder.open(plan, fingerprint, allow_mixed=options.allow_mixed)
    Attempts(folder.shards).begin_launch(_launch_name())
    try:
        Worker(plan, folder, pipe, fingerprint, stop, max(1, num_cores() // count), say).work()
    except Stopped:
        return stop.exit_code
    return 0


def is_ours() -> bool:
    """Return whether `launch` started this worker."""
    return REPORTS in os.environ


def report_end(code: int, line: str) -> bool:
    """Tell our launcher, if there is one, why this worker ends for good, and return whether there is one.

    The worker then exits with 0, so torchrun does not restart it.
    """
    if is_ours():
        Path(os.environ[REPORTS], f"{os.getpid()}.json").write_text(json.dumps([code, line]))
    return is_ours()


def launch(arguments: Sequence[str], plan: Plan, folder: Folder, options: LaunchOptions) -> None:
    """Run `fastdiff bulk ARGUMENTS` in workers until all have ended. Raises Ended if a restart cannot help.

    Raises torch's SignalException, after the workers have ended, if a signal stops this process.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for logger in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(logger).setLevel(logging.ERROR)  # each has its own level
    name = str(uuid.uuid4())
    with tempfile.TemporaryDirectory() as reports:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=min(options.workers or _usual_workers(options.device), len(plan.shards)),
            run_id=name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=RESTARTS,
            monitor_interval=0.2,
            signals_to_handle=",".join(number.name for number in end_signals()),
        )
        while True:
            before = _progress(folder)
            with _environment(reports):
                try:
                    elastic_launch(config, sys.executable)("-u", "-m", "fastdiff", "bulk", *arguments)
                    failed = None
                except ChildFailedError as error:
                    failed = error
            for report in Path(reports).iterdir():
                raise Ended(*json.loads(report.read_text()))
            if failed is None:
                return
            if _progress(folder) == before:
                rank, failure = failed.get_first_failure()
                text = f"worker {rank} failed repeatedly with exit code {failure.exitcode}; see its output above"
                raise Ended(1, f"{text}, and run the same command again")


@contextlib.contextmanager
def _environment(reports: str) -> Iterator[None]:
    """Set the workers' environment variables. Without OMP_NUM_THREADS, torchrun warns that it sets the threads."""
    wanted = {REPORTS: reports, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _progress(folder: Folder) -> dict[str, bytes]:
    """Return the state of all shards. Each can be done, given up or retried only a limited number of times."""
    found = {}
    for path in folder.shards.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.read_bytes()
    return found


def _launch_name() -> str:
    """Return a name that all workers of one launch share. Without --rdzv-id, torchrun calls every launch "none"."""
    name = os.environ["TORCHELASTIC_RUN_ID"]
    return name if name != "none" else f"{platform.node()} {os.getppid()}"


def _own_device(asked: str) -> "torch.device":
    """Return the GPU of this worker, or the CPU with one thread."""
    import torch

    from fastdiff.execution.devices import resolve_device

    device = resolve_device(asked)
    if device.type == "cpu":
        torch.set_num_threads(1)  # the number changes the bits, so it must not depend on the number of workers
        return device
    if device.index is None:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _usual_workers(asked: str) -> int:
    import torch

    from fastdiff.execution.devices import resolve_device

    device = resolve_device(asked)
    if device.type == "cpu":
        return num_cores()
    return torch.cuda.device_count() if device.index is None else 1


@dataclass(frozen=True)
class ManyPictures:
    """The result of `draw_many`."""

    folder: Path
    pictures: int  # in the folder
    given_up: dict[str, str]  # shards that failed three times, with the reason


def draw_many(
    model: str | Path,
    out: str | Path,
    *,
    label: Any = None,
    prompt: Any = None,
    num_images: int = 1,
    seed: int = SEED,
    progress: bool = True,
    **options: Any,
) -> ManyPictures:
    """Draw many pictures on all GPUs of this host into the folder `out`, in worker processes like `fastdiff bulk`.

    The pictures are labels x seeds or prompts x seeds. The same call resumes an interrupted one.

    Args:
        model: a bundled name, a diffusers folder or a hub id.
        label, prompt: one or a list of either. Without both, all labels or example prompts of the model.
        num_images: pictures per label or prompt; picture i uses seed + i.
        progress: whether to show the progress bar and its messages on sys.stderr.
        options: other flags of `fastdiff bulk` by name: num_inference_steps, guidance_scale, scheduler, dtype,
            negative_prompt, format ("png", "webdataset", "npz"), workers, batch_size, shard_size, spec, verify ...

    Raises InputError for arguments that cannot be used, OSError if the run failed, and KeyboardInterrupt, after the
    workers have ended, if the run was interrupted.
    """
    given = {"model": str(model), "out": str(out), "num_images": num_images, "seed": seed} | options
    command = [sys.executable, "-m", "fastdiff", "bulk"]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [] if value is None or value is False else [word(f"{flag}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        if label is not None or prompt is not None:
            rows = Path(folder, "rows.json")
            rows.write_text(json.dumps(_rows("label", label) + _rows("prompt", prompt)))
            command.append(f"--spec={rows}")
        code, said = _run_command(command, progress)
    errors = [line.removeprefix("fastdiff: error: ") for line in said.splitlines() if "fastdiff: error: " in line]
    state = Reader(Path(out)).read() if code in (0, 1) else None
    if state is not None and (code == 0 or state.given_up):
        return ManyPictures(Path(out), state.drawn, state.given_up)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    line = errors[-1] if errors else f"fastdiff bulk ended with exit code {code}"
    raise InputError(line) if code == 2 else OSError(line)


def _rows(name: str, values: Any) -> list[dict[str, Any]]:
    every = [] if values is None else [values] if isinstance(values, str | int) else list(values)
    return [{name: value} for value in every]


def _run_command(command: Sequence[str], progress: bool) -> tuple[int, str]:
    """Run a command and return its exit code and stderr. With `progress`, also show stderr while it runs."""
    said = ""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace") as process:
        assert process.stderr is not None
        while True:
            try:
                text = process.stderr.readline()
            except KeyboardInterrupt:  # in a notebook, only this process gets it
                process.send_signal(signal.SIGINT)
                continue
            if not text:
                return process.wait(), said
            said += text
            if progress:
                sys.stderr.write(text)

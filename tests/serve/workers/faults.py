"""A worker process with faults: a test holds its steps, or lets them fail, by files in a folder."""

import itertools
import os
import threading
import time
import uuid
from pathlib import Path

from tests.support.waiting import wait_for

FOLDER = "FASTDIFF_TEST_FAULTS"
HOLD, ERROR = "hold", "error"
DEATH = "death"  # an error: the process ends
PAUSE = 0.01  # seconds


class Faults:
    """The faults as a test sees them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, after: int = 0) -> None:
        """Let each worker take so many steps, and then hold it."""
        self._write(HOLD, f"{after} {uuid.uuid4()}")

    def release(self) -> None:
        """Let held steps go on."""
        (self._folder / HOLD).unlink(missing_ok=True)

    def held(self, count: int = 1) -> list[int]:
        """Wait until so many living workers are held, and return their process ids."""
        wait_for(lambda: len(self._held()) >= count)
        return self._held()

    def fail(self, name: str | None, pid: int | None = None) -> None:
        """Let the steps of all workers, or of one, fail by an error of `errors`, or by DEATH. None: no longer."""
        if name is None:
            (self._folder / ERROR).unlink()
        else:
            self._write(ERROR, f"{name} {pid or 'all'}")

    def _held(self) -> list[int]:
        return [int(path.name.partition("-")[2]) for path in self._folder.glob("held-*") if is_alive(path)]

    def _write(self, name: str, text: str) -> None:
        path = self._folder / str(uuid.uuid4())
        path.write_text(text)
        path.rename(self._folder / name)


def is_alive(what: Path | int) -> bool:
    """Return whether a process lives, which a held file or a number names."""
    pid = what if isinstance(what, int) else int(what.name.partition("-")[2])
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def errors() -> dict[str, Exception]:
    """Return the errors that a step may raise."""
    from fastdiff.errors import DeviceLostError, InputError, NonFiniteError
    from fastdiff.execution.memory import OutOfMemoryError

    lock = threading.Lock()
    return {
        "input": InputError("strength: 7 is too much; use 1"),
        "memory": OutOfMemoryError("cpu: out of memory"),
        "nan": NonFiniteError("the picture has NaN"),
        "mistake": KeyError("/secret/path"),
        "not-picklable": RuntimeError("it holds a lock", lock),
        "device": DeviceLostError("cuda:0: it failed"),
    }


class _Gate:
    """The faults as a worker sees them."""

    def __init__(self) -> None:
        self._folder, self._known, self._steps = Path(os.environ[FOLDER]), "", itertools.count()

    def check(self) -> None:
        """Hold a step, or raise an error."""
        self._hold()
        name, _, pid = (self._read(ERROR) or "").partition(" ")
        if pid in ("all", str(os.getpid())):
            if name == DEATH:
                os._exit(3)
            raise errors()[name]

    def _hold(self) -> None:
        text = self._read(HOLD)
        if text is None:
            return
        if text != self._known:
            self._known, self._steps = text, itertools.count()
        if next(self._steps) < int(text.split()[0]):
            return
        held = self._folder / f"held-{os.getpid()}"
        held.touch()
        while self._read(HOLD) is not None:
            time.sleep(PAUSE)
        held.unlink()

    def _read(self, name: str) -> str | None:
        try:
            return (self._folder / name).read_text()
        except FileNotFoundError:
            return None


def run(connection, device: str, setup: bytes) -> None:
    """Run a worker with faults, on one thread as the tests."""
    import torch

    from fastdiff.diffusion.shared_steps import AskedStep, Company
    from fastdiff.serve.drawing import entry

    torch.set_num_threads(1)
    take, gate = Company.take, _Gate()

    def faulty(company, asked, *rest):
        if isinstance(asked[0], AskedStep):
            gate.check()
        return take(company, asked, *rest)

    Company.take = faulty
    entry.run(connection, device, setup)

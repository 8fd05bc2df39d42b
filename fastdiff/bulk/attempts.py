"""Attempts at a shard, written before it is drawn: one that ends its workers is given up, and does not stop the rest.

An attempt that was stopped, or that the disk ended, is taken back. One that failed, and one whose worker died, counts:
the third gives the shard up. Which death was the shard's fault nobody can tell (memory's killer and a power cut look
alike), so shards that were tried come last, and every launch by the user begins to count anew: a healthy shard is given
up only if three workers of one launch are killed while they draw it.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from fastdiff.bulk.folder import naming_disk, read_object, write_object

MOST = 3


class Attempts:
    """The attempts at the shards whose names are asked for, in the files NAME.attempts.json and NAME.error.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin_launch(self, launch: str) -> None:
        """Begin to count anew, unless a worker of the same launch has done so. OSError where the disk refuses."""
        mark = self._folder / f"launch-{hashlib.sha256(launch.encode()).hexdigest()[:16]}"
        with naming_disk(mark):
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL, 0o644))
            except FileExistsError:
                return
        for ending in ("attempts", "error"):
            for path in self._folder.glob(f"*.{ending}.json"):
                path.unlink(missing_ok=True)

    def failures(self, name: str) -> list[str]:
        """Return what became of each attempt, a line each."""
        found = (read_object(self._file(name)) or {}).get("failures")
        return found if isinstance(found, list) else []

    def tried(self) -> set[str]:
        """The shards that were tried and are not done."""
        return {path.name.removesuffix(".attempts.json") for path in self._folder.glob("*.attempts.json")}

    def begin(self, name: str, worker: str) -> bool:
        """Count an attempt, whatever becomes of this process. False where there were too many: it is given up."""
        failures = self.failures(name)
        if len(failures) >= MOST:
            self._give_up(name, failures)
            return False
        self._write(name, [*failures, f"{worker} died while drawing it"])
        return True

    def fail(self, name: str, reason: str) -> None:
        """Say why the attempt failed; the third is the last."""
        failures = [*self.failures(name)[:-1], reason]
        self._write(name, failures)
        if len(failures) >= MOST:
            self._give_up(name, failures)

    def take_back(self, name: str) -> None:
        """Do not count the attempt. Nothing is raised: the disk may be full."""
        failures = self.failures(name)[:-1]
        with contextlib.suppress(OSError):
            if failures:
                self._write(name, failures)
            else:
                self.forget(name)

    def forget(self, name: str) -> None:
        """Forget the attempts at a shard that is done."""
        with contextlib.suppress(OSError):
            self._file(name).unlink(missing_ok=True)

    def given_up(self) -> dict[str, str]:
        """The shards that are given up, and why: the last failure of each."""
        found = {}
        for path in sorted(self._folder.glob("*.error.json")):
            failures = (read_object(path) or {}).get("failures") or ["unknown"]
            found[path.name.removesuffix(".error.json")] = str(failures[-1])
        return found

    def _give_up(self, name: str, failures: list[str]) -> None:
        write_object(self._folder / f"{name}.error.json", {"failures": failures})
        self.forget(name)

    def _write(self, name: str, failures: list[str]) -> None:
        """Write the file of a shard. It is to outlive a process, no power cut: drawing waits for no disk."""
        path, aside = self._file(name), self._folder / f".{name}.attempts.tmp"
        with naming_disk(path):
            try:
                aside.write_text(json.dumps({"failures": failures}))
                os.replace(aside, path)
            except OSError:
                aside.unlink(missing_ok=True)
                raise

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.attempts.json"

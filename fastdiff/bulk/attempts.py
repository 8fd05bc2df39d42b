"""Attempts at shards, recorded before drawing, so a shard that kills its workers is given up and the rest go on.

An attempt that was stopped, or that ended with a disk error, is taken back. A failed attempt and a dead worker count,
and the third gives the shard up. Nobody can tell whether a death was the shard's fault: the out-of-memory killer and a
power cut look alike. So tried shards come last, and every launch by the user counts from zero: a healthy shard is given
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
    """The attempts at shards, in the files NAME.attempts.json and NAME.error.json of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin_launch(self, launch: str) -> None:
        """Count from zero, unless a worker of the same launch has already done so. OSError if the disk refuses."""
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
        """Return a line for each attempt that says how it failed."""
        found = (read_object(self._file(name)) or {}).get("failures")
        return found if isinstance(found, list) else []

    def tried(self) -> set[str]:
        """Return the names of the shards that were tried and are not done."""
        return {path.name.removesuffix(".attempts.json") for path in self._folder.glob("*.attempts.json")}

    def begin(self, name: str, worker: str) -> bool:
        """Count an attempt, even if this process dies. Return False, and give the shard up, after too many."""
        failures = self.failures(name)
        if len(failures) >= MOST:
            self._give_up(name, failures)
            return False
        self._write(name, [*failures, f"{worker} died while drawing it"])
        return True

    def fail(self, name: str, reason: str) -> None:
        """Record why the attempt failed. The third failure gives the shard up."""
        failures = [*self.failures(name)[:-1], reason]
        self._write(name, failures)
        if len(failures) >= MOST:
            self._give_up(name, failures)

    def take_back(self, name: str) -> None:
        """Do not count the attempt. Raises nothing, as the disk may be full."""
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
            self._aside(name).unlink(missing_ok=True)  # left by a worker that died while writing it

    def given_up(self) -> dict[str, str]:
        """Return the shards that were given up, with the last failure of each."""
        found = {}
        for path in sorted(self._folder.glob("*.error.json")):
            failures = (read_object(path) or {}).get("failures") or ["unknown"]
            found[path.name.removesuffix(".error.json")] = str(failures[-1])
        return found

    def _give_up(self, name: str, failures: list[str]) -> None:
        write_object(self._folder / f"{name}.error.json", {"failures": failures})
        self.forget(name)

    def _write(self, name: str, failures: list[str]) -> None:
        """Write the file of a shard, without a sync: it must survive the process, but not a power cut."""
        path, aside = self._file(name), self._aside(name)
        with naming_disk(path):
            try:
                aside.write_text(json.dumps({"failures": failures}))
                os.replace(aside, path)
            except OSError:
                aside.unlink(missing_ok=True)
                raise

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.attempts.json"

    def _aside(self, name: str) -> Path:
        return self._folder / f".{name}.attempts.tmp"

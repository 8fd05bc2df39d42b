"""Claims of shards by lease files, on one host or on several that share a folder. Imports no torch.

Lease n of a shard is the file NAME.lease-n, which only one process can create. The highest n counts. Its holder writes
new content every few seconds. A lease is dead if its content has not changed for a minute of the watcher's own clock
(no clocks are compared), or if its process is gone on this host. Then lease n + 1 may be taken. Two processes may still
hold one shard, for example after one was suspended for a minute. They draw the same bits and commit them whole.
"""

import contextlib
import json
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.bulk.folder import naming_disk

BEAT = 2.0  # seconds between renewals of a lease
DEAD = 60.0  # seconds without a change after which a lease is dead
_SIZE = 512  # bytes of a lease: a renewal in place needs no more room on a full disk
_NAME = re.compile(r"(.+)\.lease-(\d{1,9})")


@dataclass(frozen=True)
class Process:
    """The identity of a process, for other processes to look up."""

    host: str  # host name, boot and process namespace: two containers may share the first two
    pid: int
    start: str | None  # start time in ticks since boot; None if the system does not tell

    @classmethod
    def own(cls) -> "Process":
        return cls(_host(), os.getpid(), _start_of(os.getpid()))

    def is_gone(self) -> bool:
        """Return whether the process is known to be gone. Nothing is known on other hosts, or without Linux."""
        return self.start is not None and self.host == _host() and _start_of(self.pid) != self.start


class Lease:
    """A lease that this process holds."""

    def __init__(self, name: str, path: Path, descriptor: int) -> None:
        self.name, self.drawn = name, 0  # pictures drawn so far, for other processes to read
        self._path, self._descriptor = path, descriptor
        self._identity = vars(Process.own()) | {"token": secrets.token_hex(8)}
        self._beats = 0

    def write(self) -> None:
        """Renew the content. OSError if the disk refuses."""
        content = json.dumps(self._identity | {"drawn": self.drawn, "beats": self._beats})
        self._beats += 1
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, content.encode().ljust(_SIZE))

    def beat(self) -> None:
        """Renew the content and sync it, so that other hosts see it. OSError if the disk refuses."""
        self.write()
        os.fsync(self._descriptor)

    def remove(self) -> None:
        """Release the lease: remove its file, after the files of dead leases below it."""
        os.close(self._descriptor)
        stem, number = self._path.name.rsplit("-", 1)
        for lower in range(1, int(number) + 1):
            self._path.with_name(f"{stem}-{lower}").unlink(missing_ok=True)


class Claims:
    """The leases in a folder. A thread renews those of this process; other leases are remembered as last seen."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._held: set[Lease] = set()
        self._seen: dict[str, tuple[bytes, float]] = {}  # by file name: the content, and when it last changed
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> "Claims":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for lease in list(self._held):
            self.release(lease)

    def claim(self, name: str) -> Lease | None:
        """Take the shard `name`, or return None if another process has it. One-line OSError if the disk refuses."""
        lease = self._create(name, 1)
        if lease is None:
            highest = max(self._numbers(name), default=0)
            if highest and self._is_dead(f"{name}.lease-{highest}"):
                lease = self._create(name, highest + 1)
        if lease is None:
            return None
        with self._lock:
            self._held.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """Release a lease."""
        with self._lock:
            if lease in self._held:
                self._held.remove(lease)
                with contextlib.suppress(OSError):
                    lease.remove()

    def _create(self, name: str, number: int) -> Lease | None:
        """Return a new lease, or None if another process created it first."""
        path = self._folder / f"{name}.lease-{number}"
        with naming_disk(path):
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            except FileExistsError:
                return None
            lease = Lease(name, path, descriptor)
            try:
                lease.write()  # without a sync, so drawing does not wait for the disk; the first beat syncs
            except OSError:
                lease.remove()
                raise
        return lease

    def _numbers(self, name: str) -> list[int]:
        found = []
        for path in self._folder.glob(f"{name}.lease-*"):
            match = _NAME.fullmatch(path.name)
            found += [int(match[2])] if match else []
        return found

    def _is_dead(self, file_name: str) -> bool:
        """Return whether a lease has not changed for DEAD seconds or its process is gone. False if it was removed."""
        try:
            content = (self._folder / file_name).read_bytes()
        except OSError:
            return False
        process = read_process(content)
        if process is not None and process.is_gone():
            return True
        before, since = self._seen.get(file_name, (None, 0.0))
        if content != before:
            self._seen[file_name] = content, self._clock()
            return False
        return self._clock() - since >= DEAD

    def _renew(self) -> None:
        while not self._end.wait(BEAT):
            with self._lock:
                for lease in self._held:
                    with contextlib.suppress(OSError):  # the disk may come back; until then the lease does not change
                        lease.beat()


def read_leases(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of the leases in a folder, by shard name.

    Leases of processes that are known to be gone are left out. Other dead leases are not.
    """
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for path in folder.glob("*.lease-*"):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            process = read_process(content)
            if match and process is not None and not process.is_gone():
                found.setdefault(int(match[2]), {})[match[1]] = json.loads(content)
    return {name: content for _, leases in sorted(found.items()) for name, content in leases.items()}


def read_process(content: bytes) -> Process | None:
    """Return the process that a lease names, or None if the lease is incomplete."""
    try:
        found = json.loads(content)
        return Process(found["host"], found["pid"], found["start"])
    except (ValueError, KeyError, TypeError):
        return None


def _host() -> str:
    """Return a name that is unique to this machine, boot and container."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _start_of(pid: int) -> str | None:
    """Return when a process started, or None if it is gone or the system does not tell: field 22 of stat in proc(5)."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else rest[18]

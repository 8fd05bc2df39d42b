"""Temporary files next to their targets. A later process removes those of a dead process.

A process holds a lock (flock) on its temporary files while it lives. The host is part of their names, as not every
network file system shares locks between hosts. Without locks (Windows, some file systems) nothing is removed.
"""

import contextlib
import os
import platform
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

_HOST = re.sub(r"[^A-Za-z0-9]+", "-", platform.node())[:60]
_NAME = re.compile(rf"\.fastdiff-{_HOST}-[0-9a-f]{{16}}\.tmp")


@contextlib.contextmanager
def holding(folder: Path, data: bytes) -> Iterator[Path]:
    """Yield the path of a new file in `folder` with `data`, synced to disk. Remove it afterwards if it still exists."""
    file = _create(folder)
    path = Path(file.name)
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()  # Windows cannot rename an open file
            yield path
    finally:
        path.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files in `folder` whose processes are gone, and ignore files that cannot be removed."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _create(folder: Path) -> BinaryIO:
    while True:
        path = folder / f".fastdiff-{_HOST}-{secrets.token_hex(8)}.tmp"
        file = open(path, "xb")  # noqa: SIM115
        if _lock(file.fileno()) and path.exists():  # else another process removed it just before the lock
            return file
        file.close()


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed. Return False if another process has locked it."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    return True


def _remove_if_abandoned(path: str) -> None:
    """Remove a temporary file. OSError if a process has it locked."""
    if sys.platform != "win32":
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # the name may be a link or a pipe
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
        finally:
            os.close(descriptor)

"""Temporary files beside those that they become; those of a process that is gone are removed by a later one.

A process holds a lock (flock) on its own for as long as it lives. The host is in the name, since not every network file
system shows one host the other's locks. Where there are no locks (Windows, some file systems) nothing is removed.
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
    """A new file in `folder` that holds `data`, on the disk already; at the end it is removed if it still is there."""
    file = _create(folder)
    path = Path(file.name)
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()  # no open file can be renamed there
            yield path
    finally:
        path.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files in `folder` whose processes are gone. Whatever stands in the way is left alone."""
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
        if _lock(file.fileno()) and path.exists():  # else another process took it for abandoned, just before the lock
            return file
        file.close()


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed. Whether no other process has it locked."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is ever removed
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    return True


def _remove_if_abandoned(path: str) -> None:
    """Remove a temporary file if nobody has it locked; OSError otherwise."""
    if sys.platform != "win32":
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # a link or a pipe may have the name
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
        finally:
            os.close(descriptor)

"""The server's folder for uploads. It is deleted when the server stops, or by the next server if it was killed."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

if sys.platform != "win32":
    import fcntl

PREFIX = "fastdiff-ui-"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder that no other user can read. A lock on it (flock) tells other servers that it is in use."""
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
        ExitStack() as lock,
    ):
        with contextlib.suppress(OSError):  # a file system without locks: no old folder is removed
            lock.enter_context(_locked(folder))
            _remove_abandoned()
        yield Path(folder)


def _remove_abandoned() -> None:
    """Remove the folders of servers that were killed. Folders that cannot be removed stay."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Hold the lock on a folder. Raises OSError if another process holds it, and on Windows, which has none."""
    if sys.platform == "win32":
        raise OSError("no locks")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)

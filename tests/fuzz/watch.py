"""Watch a block of code: its time, its peak memory, and the files that it reads and writes.

Python's audit events name the files that Python opens. For a folder of sentinel files, inotify also reports opens by
C++ and Rust, which read weights. Both watch the whole process, so only one block can be watched at a time.
"""

import ctypes
import os
import site
import struct
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fastdiff

MAX_SECONDS = 10  # of CPU time, which does not depend on how busy the machine is
MAX_WAIT = 60  # seconds of wall-clock time; only a deadlock takes longer
MAX_GROWTH = 2**30  # bytes

_PACKAGE = Path(fastdiff.__file__).resolve().parent
# Python, its packages and fastdiff read their own files, and write bytecode there. The environment may be a link.
_INSTALLED = (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *site.getsitepackages())
_OWN = tuple(
    {
        *_INSTALLED,
        *map(os.path.realpath, _INSTALLED),
        str(_PACKAGE),
        str(_PACKAGE.parent / "kernels"),
        str(Path(__file__).parent),
    }
)
_READABLE = (*_OWN, "/proc", "/sys", "/dev", "/usr/share", "/etc/mime.types", "/etc/localtime")
_FILES = {  # audit event -> indices of the arguments that are paths
    "open": (0,),
    "os.listdir": (0,),
    "os.scandir": (0,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.rename": (0, 1),
    "os.link": (0, 1),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.utime": (0,),
}
_NEVER = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.bind")
_watching: list["_Files"] = []  # at most one
_IN_OPEN = 0x20


@dataclass
class _Files:
    """The folder that a block may use, and the forbidden things that it did."""

    folder: str  # the case's own
    seen: list[str]

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _NEVER:
            self.seen.append(f"{event}: {args!r:.200}")
            return
        writes = event not in ("open", "os.listdir", "os.scandir") or _writes(event, args)
        for place in _FILES[event]:
            path = args[place]
            if not isinstance(path, str | bytes | os.PathLike):  # a descriptor
                continue
            whole = os.path.abspath(os.fsdecode(path))
            is_import = event == "os.listdir" and whole in map(os.path.abspath, sys.path)
            if not (is_import or self._may(whole, writes)):
                self.seen.append(f"{'wrote' if writes else 'read'} outside: {event} {os.fsdecode(path)[:200]!r}")

    def _may(self, path: str, writes: bool) -> bool:
        if _below(path, self.folder) or path == os.devnull:
            return True
        if _below(path, os.path.dirname(self.folder)):  # this may be in /dev/shm
            return False
        if writes:
            return "__pycache__" in path and any(_below(path, own) for own in _OWN)
        return any(_below(path, own) for own in _READABLE)


def _writes(event: str, args: tuple[Any, ...]) -> bool:
    flags = args[2] if event == "open" and len(args) > 2 and isinstance(args[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and (event in _FILES or event in _NEVER):
        _watching[0].see(event, args)


def install() -> None:
    """Install the audit hook, which cannot be removed. A second call does nothing."""
    if not hasattr(sys, "_fastdiff_fuzz_audit"):
        sys._fastdiff_fuzz_audit = True  # type: ignore[attr-defined]
        sys.addaudithook(_audit)


@contextmanager
def watching(folder: Path, beside: Path) -> Iterator[list[str]]:
    """Yield a list, which has a line for each broken rule once the block has ended.

    The block may read and write in `folder`. Nothing may open the files in `beside`.
    """
    install()
    problems: list[str] = []
    sentinels = _Sentinels(beside)
    before, start, worked = _resident_memory(), time.perf_counter(), time.process_time()
    _watching.append(_Files(str(folder), problems))
    try:
        yield problems
    finally:
        _watching.clear()
        worked, waited, growth = time.process_time() - worked, time.perf_counter() - start, _peak_memory() - before
        problems += sentinels.opened()
        if worked > MAX_SECONDS or waited > MAX_WAIT:
            problems.append(f"hung: {worked:.0f} s of CPU time in {waited:.0f} s")
        if growth > MAX_GROWTH:
            problems.append(f"grew: by {growth / 2**30:.1f} GB")


class _Sentinels:
    """The files of a folder, with a watch on opens."""

    def __init__(self, folder: Path) -> None:
        self._libc, self._queue = _notifications()
        self._watch = self._libc.inotify_add_watch(self._queue, os.fsencode(folder), _IN_OPEN)

    def opened(self) -> list[str]:
        """Return a line per opened file, and end the watch."""
        self._libc.inotify_rm_watch(self._queue, self._watch)
        names = []
        for events in iter(self._read, b""):
            while events:
                watch, mask, _, length = struct.unpack_from("iIII", events)
                if watch == self._watch and mask & _IN_OPEN:  # the last event says that the watch is removed
                    names.append(events[16 : 16 + length].rstrip(b"\0").decode() or ".")
                events = events[16 + length :]
        return [f"opened {name!r} beside the case's folder" for name in dict.fromkeys(names)]

    def _read(self) -> bytes:
        """Return pending events, or nothing."""
        try:
            return os.read(self._queue, 2**16)
        except BlockingIOError:
            return b""


@cache
def _notifications() -> tuple[ctypes.CDLL, int]:
    """Return the C library and an inotify queue, one per process: closing a queue takes as long as a small case."""
    libc = ctypes.CDLL(None)
    return libc, libc.inotify_init1(os.O_NONBLOCK)


def _resident_memory() -> int:
    """Return the resident bytes, and reset the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_memory() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:"))

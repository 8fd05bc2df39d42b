"""An index of the pictures on a shelf, in SQLite beside them. It is rebuilt from the PNG files at any time.

A folder is read again when its time has changed, so an index of 20,000 pictures is brought up to date in milliseconds.
"""

import contextlib
import json
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.ui.history.bin import HIDDEN
from fastdiff.ui.history.search import Search, terms, words_of

T = TypeVar("T")
OTHERS = ("users", "visitors")  # folders of other shelves, in the folder of a server's owner
WAIT = 60.0  # seconds for another thread or process that writes the index
_FRESH = 2 * 10**9  # nanoseconds; a folder that changed so recently may change again without a new time
_UNSETTLED = -1  # the time of a folder that is read again
_KIND, _VERSION = 0x66644869, 2
_TABLES = """
    CREATE TABLE folders (path TEXT PRIMARY KEY, changed INTEGER);
    CREATE TABLE pictures (
        path TEXT PRIMARY KEY, folder TEXT, changed INTEGER, size INTEGER, model TEXT, day TEXT, words TEXT,
        prompt TEXT);
    CREATE INDEX by_time ON pictures (changed DESC, path DESC);
    CREATE INDEX by_folder ON pictures (folder);
"""  # a PNG without fastdiff's settings has no words
_REBUILDING = threading.Lock()


@dataclass(frozen=True)
class Found:
    """A page of the pictures that a search finds, newest first."""

    total: int
    paths: Sequence[str]  # relative to the shelf
    models: Sequence[str]  # of all pictures
    days: Sequence[str]  # newest first


@dataclass
class Listing:
    """The contents of a folder: subfolders, and the (time, size) of its PNG files, by path relative to the shelf."""

    folders: list[str] = field(default_factory=list)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)


def list_folder(shelf: Path, folder: str) -> Listing:
    """Return the pictures and folders in a folder of a shelf. It skips hidden names, links and shelves of others."""
    listing, start = Listing(), f"{folder}/" if folder else ""
    with contextlib.suppress(OSError), os.scandir(shelf / folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or (not folder and entry.name in OTHERS) or not _is_text(entry.name):
                continue
            with contextlib.suppress(OSError):  # another process may have removed it
                if entry.is_dir(follow_symlinks=False):
                    listing.folders.append(start + entry.name)
                elif entry.name.endswith(".png") and entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    listing.files[start + entry.name] = (max(min(found.st_mtime_ns, 2**62), -(2**62)), found.st_size)
    return listing


def _is_text(name: str) -> bool:
    """Return whether SQLite can store a file's name."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class Index:
    """The index of `shelf`, a folder. Each call opens the file, so threads and processes can share it."""

    shelf: Path

    @property
    def file(self) -> Path:
        return self.shelf / HIDDEN / "index.sqlite"

    def find(self, search: Search, favourites: Sequence[str], first: int, count: int) -> Found:
        """Return up to `count` pictures of a search, from the one at `first` on, as the folder holds them now."""

        def find(db: sqlite3.Connection) -> Found:
            wanted = terms(search.text)
            where = "words IS NOT NULL" + " AND instr(words, ?)" * len(wanted)
            values: list[str] = [*wanted]
            for column, value in (("model", search.model), ("day", search.day)):
                where += f" AND {column} = ?" if value else ""
                values += [value.encode(errors="replace").decode()] if value else []
            if search.only_favourites:
                where += " AND path IN (SELECT value FROM json_each(?))"
                values.append(json.dumps(favourites))
            total = db.execute(f"SELECT count(*) FROM pictures WHERE {where}", values).fetchone()[0]
            order = "ORDER BY changed DESC, path DESC LIMIT ? OFFSET ?"
            return Found(
                total,
                _column(db, f"SELECT path FROM pictures WHERE {where} {order}", (*values, count, first)),
                _column(db, "SELECT DISTINCT model FROM pictures WHERE words IS NOT NULL ORDER BY model"),
                _column(db, "SELECT DISTINCT day FROM pictures WHERE words IS NOT NULL ORDER BY day DESC"),
            )

        return self._use(find) if self.shelf.is_dir() else Found(0, [], [], [])

    def prompts(self, count: int) -> list[str]:
        """Return up to `count` different prompts of the pictures, the last one first."""
        query = "SELECT prompt FROM pictures WHERE prompt != '' GROUP BY prompt ORDER BY max(changed) DESC LIMIT ?"
        return self._use(lambda db: _column(db, query, [count])) if self.shelf.is_dir() else []

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Call `work` with the index, up to date. A damaged or foreign file is replaced.

        If no file can be written, the index is in memory for this call.
        """
        for rebuild in (False, True):
            try:
                with contextlib.closing(self._open(rebuild)) as db:
                    _update(db, self.shelf)
                    return work(db)
            except (sqlite3.Error, OSError) as error:
                if "locked" in str(error):  # it is sound
                    break
        with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
            _create(db)
            _update(db, self.shelf)
            return work(db)

    def _open(self, rebuild: bool) -> sqlite3.Connection:
        """Open the file, and create it if it is missing, foreign or, with `rebuild`, damaged."""
        with _REBUILDING:
            self.file.parent.mkdir(exist_ok=True)
            if os.path.lexists(self.file) and (rebuild or not stat.S_ISREG(os.lstat(self.file).st_mode)):
                self.file.unlink()
            db = sqlite3.connect(self.file, timeout=WAIT, isolation_level=None)
            try:
                kind, version = (
                    db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
                )
                if (kind, version) != (_KIND, _VERSION):
                    if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                        raise sqlite3.DatabaseError("a foreign file")
                    _create(db)
            except BaseException:
                db.close()
                raise
            return db


def _create(db: sqlite3.Connection) -> None:
    db.executescript(f"BEGIN;{_TABLES}PRAGMA application_id = {_KIND};PRAGMA user_version = {_VERSION};COMMIT;")


def _column(db: sqlite3.Connection, query: str, values: Sequence[str | int] = ()) -> list[str]:
    return [str(value) for (value,) in db.execute(query, values)]


def _update(db: sqlite3.Connection, shelf: Path) -> None:
    """Bring the index up to date with the folders."""
    if not any(True for _ in _changed_folders(db, shelf)):
        return
    db.execute("BEGIN IMMEDIATE")  # waits for another thread, which then has done the work
    try:
        todo = list(_changed_folders(db, shelf))
        while todo:
            folder = todo.pop()
            known = set(_column(db, "SELECT path FROM folders"))
            todo += [each for each in _read_folder(db, shelf, folder) if each not in known]
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _changed_folders(db: sqlite3.Connection, shelf: Path) -> Iterator[str]:
    """Yield the known folders that have changed or are gone. The shelf itself is always known."""
    known = {str(path): changed for path, changed in db.execute("SELECT path, changed FROM folders")}
    for folder, changed in ({"": None} | known).items():
        if changed != _time_of(shelf / folder):
            yield folder


def _time_of(folder: Path) -> int | None:
    """Return the time of a folder's last change, or None if it is none any more."""
    try:
        found = os.lstat(folder)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns if stat.S_ISDIR(found.st_mode) else None


def _read_folder(db: sqlite3.Connection, shelf: Path, folder: str) -> list[str]:
    """Read a folder into the index. Returns its subfolders."""
    changed, now = _time_of(shelf / folder), time.time_ns()
    listing = Listing() if changed is None else list_folder(shelf, folder)
    query = "SELECT path, changed, size FROM pictures WHERE folder = ?"
    known = {str(path): (time_, size) for path, time_, size in db.execute(query, (folder,))}
    gone = [(path,) for path in known.keys() - listing.files.keys()]
    db.executemany("DELETE FROM pictures WHERE path = ?", gone)
    new = {path: found for path, found in listing.files.items() if known.get(path) != found}
    rows = ((path, folder, *found, *_settings(shelf / path, found[0])) for path, found in new.items())
    db.executemany("INSERT OR REPLACE INTO pictures VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    if changed is None:
        db.execute("DELETE FROM folders WHERE path = ?", (folder,))
    else:
        latest = max([changed, *(time_ for time_, _ in new.values())])  # a file may still be growing
        settled = changed if now - latest > _FRESH else _UNSETTLED
        db.execute("INSERT OR REPLACE INTO folders VALUES (?, ?)", (folder, settled))
    return listing.folders


def _settings(path: Path, changed: int) -> tuple[str, str, str | None, str]:
    """Return the model, the day, the words and the prompt of a picture; no words for a PNG that is none of ours.

    A grid of several prompts has none of its own.
    """
    try:
        record = png.read_settings(path)
    except InputError:
        return "", "", None, ""
    if "seed" not in record:
        return "", "", None, ""
    try:
        day = time.strftime("%Y-%m-%d", time.localtime(changed // 10**9))
    except (OSError, OverflowError, ValueError):
        day = ""
    model, prompt = (_text(record.get(name)) for name in ("model", "prompt"))
    return model, day, words_of(record), prompt if prompt.strip() else ""


def _text(value: Any) -> str:
    """Return a text as SQLite can store it; "" for anything else."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""

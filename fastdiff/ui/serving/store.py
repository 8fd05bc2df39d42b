"""Pictures that the page has drawn, kept on the disk: dated, their settings inside, each owner's apart."""

import hashlib
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import gradio as gr

from fastdiff.errors import InputError

MAX_AGE = 86400  # seconds
PICTURES = "pictures"  # the folder, in Gradio's own, of programs without a login
RECOUNT = 60.0  # seconds that a count of all visitors' pictures is taken for right
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_RUN = re.compile(r"\d{6}-[0-9a-f]{4}")


class SharedQuota:
    """The bytes that all shelves in a folder may take together."""

    def __init__(self, folder: Path, quota: float) -> None:
        self.folder, self.quota = folder, quota
        self._taken, self._counted = 0, -math.inf

    @property
    def is_full(self) -> bool:
        """Whether the quota is used up. There may be a million files: the count may be a minute old,
        unless it says that the quota is full."""
        if self._taken >= self.quota or time.monotonic() - self._counted > RECOUNT:
            shelves = map(Shelf, self.folder.iterdir() if self.folder.is_dir() else ())
            self._taken = sum(shelf.size() for shelf in shelves)
            self._counted = time.monotonic()
        return self._taken >= self.quota


@dataclass(frozen=True)
class Shelf:
    """The pictures of one owner: FOLDER/DAY/TIME-NUMBER/NAME.png."""

    folder: Path
    quota: int | None = None  # bytes
    shared: SharedQuota | None = None  # of all visitors

    def new_folder(self) -> Path:
        """The folder of a new run, which its first picture makes. InputError once the quota is used up."""
        if self.quota is not None and self.size() >= self.quota:
            kept = f"{self.quota / 2**20:,.0f} MiB"
            raise InputError(f"your pictures fill the {kept} that are kept for each; delete some in History")
        if self.shared is not None and self.shared.is_full:
            kept = f"{self.shared.quota / 2**20:,.0f} MiB"
            raise InputError(
                f"the pictures of all visitors fill the {kept} that are kept; delete yours, or ask who runs this page"
            )
        return self.folder / time.strftime("%Y-%m-%d") / f"{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"

    def paths(self) -> list[Path]:
        """All pictures, the newest first."""
        return [path for run in self.runs() for path in _newest_first(run)]

    def runs(self) -> Iterator[Path]:
        """The folders of all runs, the newest first."""
        return (run for day in _folders(self.folder, _DAY) for run in _folders(day, _RUN))

    def size(self) -> int:
        """The bytes of all pictures."""
        total = 0
        for path in self.paths():
            with suppress(OSError):  # another tab deletes it
                total += path.stat().st_size
        return total

    def holds(self, path: Path) -> bool:
        """Whether `path`, without links in it, is one of the pictures."""
        folder = self.folder.resolve()
        if not path.is_relative_to(folder) or path.suffix != ".png":
            return False
        parts = path.relative_to(folder).parts
        return len(parts) == 3 and bool(_DAY.fullmatch(parts[0]) and _RUN.fullmatch(parts[1]))

    def delete(self, path: Path) -> None:
        """Delete a picture, and its folders once they are empty. InputError for any other file."""
        if not self.holds(path.resolve()):
            raise InputError("that picture is not one of yours; choose another")
        path.unlink(missing_ok=True)
        remove_empty(path.parent)


def remove_empty(run: Path) -> None:
    """Remove the folder of a run, and of its day, if nothing is in them."""
    with suppress(OSError):
        run.rmdir()
        run.parent.rmdir()


def _folders(folder: Path, name: re.Pattern) -> Iterator[Path]:
    """The folders whose names match, the last name first."""
    with suppress(OSError):
        yield from (folder / each for each in sorted(os.listdir(folder), reverse=True) if name.fullmatch(each))


def _newest_first(run: Path) -> list[Path]:
    try:
        entries = [(entry.stat().st_mtime_ns, entry.name) for entry in os.scandir(run) if entry.name.endswith(".png")]
    except OSError:  # another tab deletes it
        return []
    return [run / name for _, name in sorted(entries, reverse=True)]


class Store:
    """All shelves below a folder."""

    def __init__(self, root: Path, quota: int | None = None, visitors: float = math.inf) -> None:
        """quota: the bytes of each owner where the page is served to others; None: all pictures are one person's.

        visitors: the bytes of all together who have not logged in.
        """
        self.root, self.quota = root.resolve(), quota
        self._visitors = SharedQuota(self.root / "visitors", visitors)

    @property
    def is_shared(self) -> bool:
        return self.quota is not None

    def shelf(self, user: str | None, token: str) -> Shelf:
        """The shelf of a user who has logged in, else of the browser that has `token`, which nobody can guess."""
        if not self.is_shared:
            return Shelf(self.root)
        if user:
            return Shelf(self.root / "users" / quote(user, safe="").replace(".", "%2E"), self.quota)
        name = hashlib.sha256(token.encode()).hexdigest()[:32]
        return Shelf(self._visitors.folder / name, self.quota, self._visitors)

    def runs(self) -> list[Path]:
        """The folders of all runs on all shelves."""
        folders = [self.root, *self.root.glob("users/*"), *self._visitors.folder.glob("*")]
        return [run for folder in folders for run in Shelf(folder).runs()]


def new_folder(quota: int) -> Path:
    """An empty folder inside Gradio's own, whose files it serves as they are; nobody can guess its name.

    A folder that was not used for MAX_AGE is deleted, and the oldest where all have more than `quota` bytes.
    """
    root = Path(gr.utils.get_upload_folder(), PICTURES)
    root.mkdir(parents=True, exist_ok=True)
    for folder in sorted(root.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True):
        quota -= sum(path.stat().st_size for path in folder.iterdir())
        if quota < 0 or time.time() - folder.stat().st_mtime > MAX_AGE:
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(dir=root))

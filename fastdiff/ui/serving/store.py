"""The pictures that the page has drawn, on disk by owner and date, with their settings inside."""

import hashlib
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import gradio as gr

from fastdiff.errors import InputError
from fastdiff.ui.history.bin import Bin
from fastdiff.ui.history.favourites import Favourites
from fastdiff.ui.history.index import OTHERS, Found, Index, Listing, list_folder
from fastdiff.ui.history.search import Search
from fastdiff.ui.inputs.uploaded import PICTURES

MAX_AGE = 86400  # seconds
RECOUNT = 60.0  # seconds until the pictures of all visitors are counted again
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_RUN = re.compile(r"\d{6}-[0-9a-f]{4}")


class SharedQuota:
    """The quota in bytes of all shelves in a folder together."""

    def __init__(self, folder: Path, quota: float) -> None:
        self.folder, self.quota = folder, quota
        self._taken, self._counted = 0, -math.inf

    @property
    def is_full(self) -> bool:
        """Whether the quota is used up. There may be a million files, so the count may be a minute old,
        unless it says that the quota is full."""
        if self._taken >= self.quota or time.monotonic() - self._counted > RECOUNT:
            self._taken = sum(shelf.size() for shelf in self._shelves())
            self._counted = time.monotonic()
        return self._taken >= self.quota

    def empty_bins(self) -> None:
        """Delete permanently what visitors have deleted."""
        for shelf in self._shelves():
            shelf.bin.empty(0)
        self._counted = -math.inf

    def _shelves(self) -> "list[Shelf]":
        return [*map(Shelf, self.folder.iterdir() if self.folder.is_dir() else ())]


@dataclass(frozen=True)
class Shelf:
    """The pictures of one owner: FOLDER/DAY/TIME-NUMBER/NAME.png, and all others that the command wrote into FOLDER."""

    folder: Path
    quota: int | None = None  # bytes
    shared: SharedQuota | None = None  # of all visitors

    def new_folder(self) -> Path:
        """Return the folder of a new run; its first picture creates it. Raises InputError if the quota is used up.

        Deleted pictures count, so they are removed from the bin for good once they fill the quota.
        """
        if self.quota is not None and self.size() >= self.quota:
            self.bin.empty(0)
        if self.quota is not None and self.size() >= self.quota:
            kept = f"{self.quota / 2**20:,.0f} MiB"
            raise InputError(f"your pictures fill your quota of {kept}; delete some in History")
        if self.shared and self.shared.is_full:
            self.shared.empty_bins()
        if self.shared is not None and self.shared.is_full:
            kept = f"{self.shared.quota / 2**20:,.0f} MiB"
            raise InputError(
                f"the pictures of all visitors fill their quota of {kept}; delete some, or ask the owner of this page"
            )
        return self.folder / time.strftime("%Y-%m-%d") / f"{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"

    def find(self, search: Search, first: int, count: int) -> Found:
        """Return a page of the pictures that a search finds, newest first."""
        found = self.index.find(search, self.favourites.read(), first, count)
        return replace(found, paths=[path for path in found.paths if self.holds((self.folder / path).resolve())])

    def paths(self) -> list[Path]:
        """Return all PNG files, newest first, without the index."""
        folders, files = [""], Listing().files
        while folders:
            listing = list_folder(self.folder, folders.pop())
            folders += listing.folders
            files |= listing.files
        return [self.folder / path for path in sorted(files, key=lambda path: (files[path][0], path), reverse=True)]

    def runs(self) -> Iterator[Path]:
        """Return the folders of all runs, newest first."""
        return (run for day in _folders(self.folder, _DAY) for run in _folders(day, _RUN))

    def size(self) -> int:
        """Return the bytes of all pictures, the deleted ones included."""
        total = self.bin.size()
        for path in self.paths():
            with suppress(OSError):  # another tab may have deleted it
                total += path.stat().st_size
        return total

    def holds(self, path: Path) -> bool:
        """Return whether `path`, which must be resolved, is one of the pictures."""
        folder = self.folder.resolve()
        if not path.is_relative_to(folder) or path.suffix != ".png":
            return False
        parts = path.relative_to(folder).parts
        return parts[0] not in OTHERS and not any(part.startswith(".") for part in parts)

    @property
    def bin(self) -> Bin:
        return Bin(self.folder)

    @property
    def index(self) -> Index:
        return Index(self.folder)

    @property
    def favourites(self) -> Favourites:
        return Favourites(self.folder)

    def delete(self, paths: Sequence[Path]) -> str:
        """Move pictures into the bin, and remove their folders if they are empty then.

        Returns the name of the deletion, for `bin.restore`. Raises InputError, and moves none, for any other file.
        """
        if not all(self.holds(path.resolve()) for path in paths):
            raise InputError("this picture is not yours; choose another")
        deletion = self.bin.put(paths)
        for run in {path.parent for path in paths}:
            remove_empty(run)
        return deletion


def remove_empty(run: Path) -> None:
    """Remove the folder of a run, and the folder of its day, if they are empty."""
    with suppress(OSError):
        run.rmdir()
        run.parent.rmdir()


def _folders(folder: Path, name: re.Pattern) -> Iterator[Path]:
    """Yield the folders whose names match, in descending order of their names."""
    with suppress(OSError):
        yield from (folder / each for each in sorted(os.listdir(folder), reverse=True) if name.fullmatch(each))


class Store:
    """All shelves below a folder."""

    def __init__(self, root: Path, quota: int | None = None, visitors: float = math.inf) -> None:
        """quota: the bytes per owner on a shared server; None means that all pictures belong to one person.

        visitors: the bytes of all visitors without a login together.
        """
        self.root, self.quota = root.resolve(), quota
        self._visitors = SharedQuota(self.root / "visitors", visitors)

    @property
    def is_shared(self) -> bool:
        return self.quota is not None

    def shelf(self, user: str | None, token: str) -> Shelf:
        """Return the shelf of a logged-in user, or else of the browser with `token`, which nobody can guess."""
        if not self.is_shared:
            return Shelf(self.root)
        if user:
            return Shelf(self.root / "users" / quote(user, safe="").replace(".", "%2E"), self.quota)
        name = hashlib.sha256(token.encode()).hexdigest()[:32]
        return Shelf(self._visitors.folder / name, self.quota, self._visitors)

    def runs(self) -> list[Path]:
        """Return the folders of all runs on all shelves."""
        folders = [self.root, *self.root.glob("users/*"), *self._visitors.folder.glob("*")]
        return [run for folder in folders for run in Shelf(folder).runs()]


def new_folder(quota: int) -> Path:
    """Create a folder with a random name inside Gradio's own folder, from which Gradio serves files as they are.

    Folders that were not used for MAX_AGE are deleted, and so are the oldest ones once all exceed `quota` bytes.
    """
    root = Path(gr.utils.get_upload_folder(), PICTURES)
    root.mkdir(parents=True, exist_ok=True)
    for folder in sorted(root.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True):
        quota -= sum(path.stat().st_size for path in folder.iterdir())
        if quota < 0 or time.time() - folder.stat().st_mtime > MAX_AGE:
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(dir=root))

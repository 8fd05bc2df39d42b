"""Pictures that the page has drawn, kept on the disk: dated, their settings inside, each owner's apart."""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fastdiff.errors import InputError

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_RUN = re.compile(r"\d{6}-[0-9a-f]{4}")


@dataclass(frozen=True)
class Shelf:
    """The pictures of one owner: FOLDER/DAY/TIME-NUMBER/NAME.png."""

    folder: Path
    quota: int | None = None  # bytes

    def new_folder(self) -> Path:
        """The folder of a new run, which its first picture makes. InputError once the quota is used up."""
        if self.quota is not None and sum(path.stat().st_size for path in self.paths()) >= self.quota:
            kept = f"{self.quota / 2**20:,.0f} MiB"
            raise InputError(f"your pictures fill the {kept} that are kept for each; delete some in History")
        return self.folder / time.strftime("%Y-%m-%d") / f"{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"

    def paths(self) -> list[Path]:
        """All pictures, the newest first."""
        runs = (run for day in _folders(self.folder, _DAY) for run in _folders(day, _RUN))
        return [path for run in runs for path in _newest_first(run)]

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
        with suppress(OSError):
            path.parent.rmdir()
            path.parent.parent.rmdir()


def _folders(folder: Path, name: re.Pattern) -> Iterator[Path]:
    """The folders of such a name, the last name first."""
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

    def __init__(self, root: Path, quota: int | None = None) -> None:
        """quota: the bytes of each owner where the page is served to others; None: all pictures are one person's."""
        self.root, self.quota = root.resolve(), quota

    @property
    def is_shared(self) -> bool:
        return self.quota is not None

    def shelf(self, user: str | None, token: str) -> Shelf:
        """The shelf of a user who has logged in, else of the browser that has `token`, which nobody can guess."""
        if not self.is_shared:
            return Shelf(self.root)
        if user:
            return Shelf(self.root / "users" / quote(user, safe="").replace(".", "%2E"), self.quota)
        return Shelf(self.root / "visitors" / hashlib.sha256(token.encode()).hexdigest()[:32], self.quota)

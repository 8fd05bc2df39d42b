"""The bin of a shelf: deleted pictures, which can be restored for 30 days."""

import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HIDDEN = ".fastdiff"  # folder beside the pictures, which is never served
KEPT = 30 * 86400  # seconds


@dataclass(frozen=True)
class Bin:
    """The deleted pictures of `shelf`, a folder: SHELF/.fastdiff/bin/SECONDS-NUMBER/ and their places on the shelf.

    A deletion is one folder, so that it can be undone as a whole. A picture moves, so it keeps its time.
    """

    shelf: Path

    @property
    def folder(self) -> Path:
        return self.shelf / HIDDEN / "bin"

    def put(self, paths: Iterable[Path]) -> str:
        """Move pictures, which must be on the shelf, into the bin. Returns the name of the deletion.

        Pictures that are gone are left out: another tab may have deleted them. Empties the bin of old pictures.
        """
        self.empty()
        name = f"{int(time.time())}-{secrets.token_hex(4)}"
        for path in paths:
            target = self.folder / name / path.relative_to(self.shelf)
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                path.rename(target)
        return name

    def restore(self, name: str) -> list[Path]:
        """Move the pictures of a deletion back. A picture whose name is taken by now gets a new one."""
        deletion, restored = self.folder / name, []
        for path in sorted(path for path in deletion.rglob("*") if path.is_file()):
            target = self.shelf / path.relative_to(deletion)
            target.parent.mkdir(parents=True, exist_ok=True)
            while os.path.lexists(target):
                target = target.with_stem(f"{target.stem}-{secrets.token_hex(2)}")
            path.rename(target)
            restored.append(target)
        shutil.rmtree(deletion, ignore_errors=True)
        return restored

    def empty(self, kept: float = KEPT) -> None:
        """Delete permanently what has been in the bin for more than `kept` seconds. 0 deletes everything."""
        for deletion in self._deletions():
            with suppress(ValueError):
                if time.time() - int(deletion.name.partition("-")[0]) >= kept:
                    shutil.rmtree(deletion, ignore_errors=True)

    def size(self) -> int:
        """Return the bytes of all pictures in the bin."""
        total = 0
        for deletion in self._deletions():
            for path in deletion.rglob("*"):
                with suppress(OSError):  # another tab may have restored it
                    total += path.stat().st_size if path.is_file() else 0
        return total

    def _deletions(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from [self.folder / name for name in os.listdir(self.folder)]

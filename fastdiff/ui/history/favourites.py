"""The favourites of a shelf: a JSON list of paths beside the pictures."""

import contextlib
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.ui.history.bin import HIDDEN

_WRITING = threading.Lock()


@dataclass(frozen=True)
class Favourites:
    shelf: Path

    @property
    def file(self) -> Path:
        return self.shelf / HIDDEN / "favourites.json"

    def read(self) -> list[str]:
        """Return the paths, relative to the shelf. A damaged file has none."""
        with contextlib.suppress(ValueError):
            return self._read()
        return []

    def switch(self, paths: Iterable[Path]) -> bool:
        """Make all pictures favourites, or none of them if all are. Returns whether they are now.

        Raises InputError for a damaged file, which stays as it is.
        """
        names = [path.relative_to(self.shelf).as_posix() for path in paths]
        with _WRITING:
            try:
                favourites = dict.fromkeys(self._read())
            except ValueError:
                raise InputError(f"{self.file} is damaged; mend or delete it") from None
            add = not favourites.keys() >= set(names)
            kept = [*favourites, *names] if add else [name for name in favourites if name not in names]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(list(dict.fromkeys(kept)), indent=1)
            with temporaries.holding(self.file.parent, text.encode()) as path:
                os.replace(path, self.file)
        return add

    def _read(self) -> list[str]:
        """Return the paths. Raises ValueError for a damaged file."""
        try:
            names = json.loads(self.file.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of paths")
        return names

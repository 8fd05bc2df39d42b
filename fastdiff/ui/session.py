"""One visit: the pictures drawn in it, in a folder of its own. Nothing here is shared between visits."""

import shutil
import tempfile
import time
from pathlib import Path

import gradio as gr

from fastdiff.ui.drawn import Drawn

MAX_AGE = 86400  # seconds


class Session:
    """The value of a gr.State, which copies it for each visit: a copy is a new and empty session."""

    def __init__(self) -> None:
        self.history: list[Drawn] = []  # newest first
        self.run: list[Drawn] = []  # the pictures of the Draw tab, in order
        self._folder: Path | None = None

    def __deepcopy__(self, memo: dict) -> "Session":
        return Session()

    def new_folder(self) -> Path:
        """An empty folder that is deleted with the session."""
        if self._folder is None:
            self._folder = new_folder()
        return Path(tempfile.mkdtemp(dir=self._folder))

    def remember(self, drawn: list[Drawn]) -> None:
        """Pictures that were finished."""
        self.history[:0] = reversed(drawn)

    def close(self) -> None:
        """Delete the pictures."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def new_folder() -> Path:
    """An empty folder inside Gradio's own, whose files it serves as they are; nobody can guess its name.

    Those that were not used for MAX_AGE are deleted.
    """
    root = Path(gr.utils.get_upload_folder(), "pictures")
    root.mkdir(parents=True, exist_ok=True)
    for folder in root.iterdir():
        if time.time() - folder.stat().st_mtime > MAX_AGE:
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(dir=root))

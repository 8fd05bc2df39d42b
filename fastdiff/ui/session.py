"""One visit, and where its pictures are kept."""

import shutil
import tempfile
import time
from pathlib import Path

import gradio as gr

from fastdiff.ui.drawn import Drawn
from fastdiff.ui.serving.owners import shelf_of
from fastdiff.ui.store import Shelf, Store

MAX_AGE = 86400  # seconds


class Session:
    """The value of a gr.State, which copies it for each visit: a copy is a new and empty session."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.run: list[Drawn] = []  # the pictures of the Draw tab, in order
        self.shown: list[Drawn] = []  # those of the History tab

    def __deepcopy__(self, memo: dict) -> "Session":
        return Session(self.store)

    def shelf(self, request: gr.Request) -> Shelf:
        """The pictures of whoever sent `request`."""
        return shelf_of(self.store, request)


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

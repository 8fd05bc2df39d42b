"""The button that downloads the pictures of a run as one, a grid that restores."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from fastdiff.errors import InputError
from fastdiff.ui.drawn import write_grid
from fastdiff.ui.messages import PROBLEMS, note, problem
from fastdiff.ui.session import Session
from fastdiff.ui.tabs.running import QUICK, Updates

_DOWNLOAD = """(file) => {
    if (!file) return;
    const link = document.createElement("a");
    link.href = file.url;
    link.download = file.orig_name;
    link.click();
}"""


@dataclass(frozen=True)
class SaveGrid:
    button: gr.Button
    file: gr.DownloadButton  # never seen

    @classmethod
    def build(cls) -> "SaveGrid":
        return cls(
            gr.Button("Save as a grid", size="sm", scale=0, min_width=160, visible=False, elem_id="save-grid"),
            gr.DownloadButton(visible=False),
        )

    def connect(self, session: gr.State, status: gr.HTML) -> None:
        def save(session: Session) -> Updates:
            """Write the grid into the folder of the run, where History finds it too."""
            try:
                if session.asked is None or not session.run:
                    raise InputError("there is no run yet; draw several pictures first")
                path = write_grid(session.asked, session.run)
            except PROBLEMS as error:
                return {self.file: None, status: problem(error)}
            return {self.file: str(path), status: note("Saved grid.png; it is in History too")}

        self.button.click(save, session, [self.file, status], **QUICK).then(
            None, self.file, None, js=_DOWNLOAD, **QUICK
        )

    def show(self, session: Session) -> dict[Any, Any]:
        """The button where there is a run of several pictures."""
        return {self.button: gr.update(visible=session.asked is not None and len(session.run) > 1)}

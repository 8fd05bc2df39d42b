"""The History tab: all saved pictures of the user, newest first, in pages."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import AXES
from fastdiff.ui.draw_tab import DrawTab
from fastdiff.ui.drawing import Drawn, Session
from fastdiff.ui.gallery import GRID, ONE, Panel, Stage, required
from fastdiff.ui.parts.axes import Axes
from fastdiff.ui.parts.messages import PROBLEMS, note, number_of_pictures, problem
from fastdiff.ui.parts.running import QUICK, Updates

PAGE_SIZE = 40  # pictures
UNDO = 10.0  # seconds for which Undo is offered, at least
REFRESH = 2.0  # seconds between two checks for new pictures while the tab is open


@dataclass(frozen=True)
class HistoryTab:
    session: gr.State
    page: gr.Number
    status: gr.HTML
    undo: gr.Button
    stage: Stage
    panel: Panel

    @classmethod
    def build(cls, tab: gr.Tab, tabs: gr.Tabs, draw: DrawTab, session: gr.State) -> "HistoryTab":
        """Fill `tab`. The settings of a picture can be sent to `draw`, a tab of `tabs`."""
        with gr.Row(equal_height=True):
            status = gr.HTML(note("Your pictures, newest first"), elem_id="history-status")
            undo = gr.Button("Undo", size="sm", scale=0, min_width=80, visible=False, elem_id="undo")
            page = gr.Number(1, minimum=1, precision=0, label="Page", min_width=100, scale=0, elem_id="history-page")
        with gr.Row():
            with gr.Column(scale=3, min_width=300, elem_classes="stage-column"):
                stage = Stage.build("History", "history", view=GRID)
            with gr.Column(scale=2, min_width=300):
                panel = Panel.build()
        with panel.buttons:
            delete = gr.Button("Delete", size="sm", min_width=140, elem_id="delete")
        history = cls(session, page, status, undo, stage, panel)
        inputs = [session, page]
        outputs = [status, undo, page, stage.gallery, stage.view, *panel.components]
        tab.select(history.show, inputs, outputs, preprocess=False, **QUICK)
        timer = gr.Timer(REFRESH, active=False)
        timer.tick(history.refresh, [*inputs, panel.chosen], outputs, preprocess=False, **QUICK)
        tabs.select(_is_open, None, timer, **QUICK)
        page.submit(history.show, inputs, outputs, preprocess=False, **QUICK)
        delete.click(history.delete, [*inputs, panel.chosen], outputs, preprocess=False, **QUICK)
        undo.click(history.restore, inputs, outputs, preprocess=False, **QUICK)
        panel.follow(stage, session, lambda session: session.listed)
        used = panel.use.click(draw.use, panel.chosen, draw.shown, **QUICK)
        for restored in (used.then, draw.upload.upload):
            restored(lambda: (gr.update(selected="draw"), gr.update(active=False)), None, [tabs, timer], **QUICK)
        return history

    def show(self, session: Session, page: float | None, request: gr.Request) -> Updates:
        """Show a page of the pictures; a number out of range gives the nearest page."""
        shelf = session.shelf(request)
        number = min(max(1, int(page)), 2**31) if isinstance(page, int | float) and math.isfinite(page) else 1
        found = shelf.find(session.search, PAGE_SIZE * (number - 1), PAGE_SIZE)
        pages = max(1, math.ceil(found.total / PAGE_SIZE))
        if number > pages:
            return self.show(session, pages, request)
        session.listed = [drawn for path in found.paths if (drawn := _read(shelf.folder / path))]
        count = f"{number_of_pictures(found.total)}, newest first; page {number} of {pages}"
        return {
            self.status: note(count),
            self.page: gr.update(value=number, maximum=pages),
            **self.stage.show(session.listed),
            self.stage.view: GRID,
            **self.panel.hide(),
        }

    def refresh(self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Show the page with new pictures; an enlarged picture stays enlarged."""
        before, is_late = session.listed, session.deletion is not None and time.monotonic() >= session.deletion[1]
        late: Updates = {self.undo: gr.update(visible=False)} if is_late else {}
        session.deletion = None if is_late else session.deletion
        updates = self.show(session, page, request)
        if session.listed == before:
            return late or {self.status: gr.skip()}
        if chosen in session.listed:
            index = session.listed.index(chosen)
            updates |= self.stage.show(session.listed, index)
            kept = {self.stage.view, *self.panel.components}
            updates = {key: value for key, value in updates.items() if key not in kept}
        return updates | late

    def delete(self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Move the selected picture into the bin, and show the next one."""
        try:
            picture = required(chosen)
            place = session.listed.index(picture) if picture in session.listed else 0
            session.deletion = session.shelf(request).delete([picture.path]), time.monotonic() + UNDO
        except PROBLEMS as error:
            return {self.status: problem(error)}
        updates = self.show(session, page, request) | self._enlarge(session, place)
        return updates | {self.status: note("Deleted 1 picture"), self.undo: gr.update(visible=True)}

    def restore(self, session: Session, page: float | None, request: gr.Request) -> Updates:
        """Undo the last deletion, and show the first of its pictures if it is on the page."""
        hidden = {self.undo: gr.update(visible=False)}
        try:
            restored = session.shelf(request).bin.restore(session.deletion[0]) if session.deletion else []
        except PROBLEMS as error:
            return {self.status: problem(error)}
        session.deletion = None
        updates = self.show(session, page, request)
        places = [place for place, drawn in enumerate(session.listed) if drawn.path in restored]
        updates |= self._enlarge(session, places[0]) if places else {}
        return updates | hidden | {self.status: note(f"Restored {number_of_pictures(len(restored))}")}

    def _enlarge(self, session: Session, place: int) -> Updates:
        """Show the picture at `place`, or else the last one."""
        if not session.listed:
            return {}
        place = min(place, len(session.listed) - 1)
        shown = self.stage.show(session.listed, place) | self.panel.show(session.listed[place])
        return shown | {self.stage.view: ONE}


def _is_open(event: gr.SelectData) -> dict[str, Any]:
    """Check for new pictures only while the tab is open."""
    return gr.update(active=event.value == "History")


def _read(path: Path) -> Drawn | None:
    """Read a saved picture. Returns None if it was deleted or damaged."""
    try:
        record = png.read_settings(str(path))
        if AXES in record:
            Axes.from_record(record[AXES], path.name)
    except InputError:
        return None
    return Drawn(path, record) if "seed" in record else None

"""The History tab: all saved pictures of the user, newest first, in pages."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import AXES
from fastdiff.ui.draw_tab import DrawTab
from fastdiff.ui.drawing import Drawn, Session
from fastdiff.ui.gallery import GRID, Panel, Stage, required
from fastdiff.ui.parts.axes import Axes
from fastdiff.ui.parts.messages import PROBLEMS, note, number_of_pictures, problem
from fastdiff.ui.parts.running import QUICK, Updates

PAGE_SIZE = 40  # pictures
REFRESH = 2.0  # seconds between two checks for new pictures while the tab is open


@dataclass(frozen=True)
class HistoryTab:
    session: gr.State
    page: gr.Number
    status: gr.HTML
    stage: Stage
    panel: Panel

    @classmethod
    def build(cls, tab: gr.Tab, tabs: gr.Tabs, draw: DrawTab, session: gr.State) -> "HistoryTab":
        """Fill `tab`. The settings of a picture can be sent to `draw`, a tab of `tabs`."""
        with gr.Row():
            status = gr.HTML(note("Your pictures, newest first"), elem_id="history-status")
            page = gr.Number(1, minimum=1, precision=0, label="Page", min_width=100, scale=0, elem_id="history-page")
        with gr.Column(elem_classes="stage-column"):
            stage = Stage.build("History", "history", view=GRID)
        panel = Panel.build()
        with panel.box:
            delete = gr.Button("Delete this picture", variant="stop", elem_id="delete")
        history = cls(session, page, status, stage, panel)
        inputs, outputs = [session, page], [status, page, stage.gallery, stage.view, *panel.components]
        tab.select(history.show, inputs, outputs, preprocess=False, **QUICK)
        timer = gr.Timer(REFRESH, active=False)
        timer.tick(history.refresh, [*inputs, panel.chosen], outputs, preprocess=False, **QUICK)
        tabs.select(_is_open, None, timer, **QUICK)
        page.submit(history.show, inputs, outputs, preprocess=False, **QUICK)
        delete.click(history.delete, [*inputs, panel.chosen], outputs, preprocess=False, **QUICK)
        panel.follow(stage, session, lambda session: session.listed)
        used = panel.use.click(draw.use, panel.chosen, draw.shown, **QUICK)
        for restored in (used.then, draw.upload.upload):
            restored(lambda: (gr.update(selected="draw"), gr.update(active=False)), None, [tabs, timer], **QUICK)
        return history

    def show(self, session: Session, page: float | None, request: gr.Request) -> Updates:
        """Show a page of the pictures; a number out of range gives the nearest page."""
        paths = session.shelf(request).paths()
        pages = max(1, math.ceil(len(paths) / PAGE_SIZE))
        number = min(max(1, int(page)), pages) if isinstance(page, int | float) and math.isfinite(page) else 1
        session.listed = [
            drawn for path in paths[PAGE_SIZE * (number - 1) : PAGE_SIZE * number] if (drawn := _read(path))
        ]
        count = f"{number_of_pictures(len(paths))}, newest first; page {number} of {pages}"
        return {
            self.status: note(count),
            self.page: gr.update(value=number, maximum=pages),
            **self.stage.show(session.listed),
            self.stage.view: GRID,
            **self.panel.hide(),
        }

    def refresh(self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Show the page with new pictures; an enlarged picture stays enlarged."""
        before = session.listed
        updates = self.show(session, page, request)
        if session.listed == before:
            return {self.status: gr.skip()}
        if chosen in session.listed:
            index = session.listed.index(chosen)
            updates |= self.stage.show(session.listed, index)
            kept = {self.stage.view, *self.panel.components}
            updates = {key: value for key, value in updates.items() if key not in kept}
        return updates

    def delete(self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Delete the selected picture permanently."""
        try:
            session.shelf(request).delete(required(chosen).path)
        except PROBLEMS as error:
            return {self.status: problem(error)}
        return self.show(session, page, request)


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

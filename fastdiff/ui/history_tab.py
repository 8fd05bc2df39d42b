"""The History tab: all saved pictures of the user, newest first, in pages."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.request import AXES
from fastdiff.ui.draw_tab import DrawTab
from fastdiff.ui.drawing import Drawn, Session, write_loose_grid, write_zip
from fastdiff.ui.gallery import CLOSE, DOWNLOAD, GRID, ONE, Panel, Stage, captioned, clicked, required
from fastdiff.ui.history.index import Found
from fastdiff.ui.history.search import MAX_QUERY, Search
from fastdiff.ui.inputs.axes import Axes
from fastdiff.ui.queueing.messages import PROBLEMS, note, number_of_pictures, problem
from fastdiff.ui.queueing.running import QUICK, Updates
from fastdiff.ui.serving.store import Shelf, new_folder

PAGE_SIZE = 40  # pictures
MOST_SELECTED = 500  # pictures
UNDO = 10.0  # seconds for which Undo is offered, at least
REFRESH = 2.0  # seconds between two checks for new pictures while the tab is open
FAVOURITE, SELECTED = "★ ", "✓ "  # before the captions of pictures
NONE_SELECTED = "Click pictures to select them"
ALL_MODELS, ALL_DAYS = ("All models", ""), ("All days", "")


@dataclass(frozen=True)
class Filters:
    """The fields that choose which pictures History shows."""

    text: gr.Textbox
    model: gr.Dropdown
    day: gr.Dropdown
    only_favourites: gr.Checkbox

    @classmethod
    def build(cls) -> "Filters":
        """Build the fields inside a row, except the checkbox, which is rendered elsewhere."""
        return cls(
            gr.Textbox(
                label="Search",
                placeholder="Words of prompts and settings, or: seed 5",
                max_length=MAX_QUERY,
                scale=3,
                min_width=220,
                elem_id="history-search",
            ),
            gr.Dropdown([ALL_MODELS], value="", label="Model of the pictures", min_width=140),
            gr.Dropdown([ALL_DAYS], value="", label="Day", min_width=140),
            gr.Checkbox(label="Only favourites", container=False, scale=0, min_width=150, render=False),
        )

    @property
    def fields(self) -> list[gr.Textbox | gr.Dropdown | gr.Checkbox]:
        """The fields in the order of the arguments of `Search.of_page`."""
        return [self.text, self.model, self.day, self.only_favourites]

    def offer(self, found: Found) -> Updates:
        """Offer the models and the days that the pictures have."""
        return {
            self.model: gr.update(choices=[ALL_MODELS, *((name, name) for name in found.models if name)]),
            self.day: gr.update(choices=[ALL_DAYS, *((day, day) for day in found.days if day)]),
        }


@dataclass(frozen=True)
class Selection:
    """The switch between one and several pictures, and the buttons that act on several."""

    several: gr.Checkbox
    box: gr.Column
    count: gr.HTML
    page: gr.Button
    zip: gr.Button
    grid: gr.Button
    favourite: gr.Button
    delete: gr.Button
    file: gr.DownloadButton  # always hidden

    @classmethod
    def build(cls, several: gr.Checkbox) -> "Selection":
        with gr.Column(visible=False, elem_id="selection") as box, gr.Row(equal_height=True):
            count = gr.HTML(note(NONE_SELECTED))
            page = gr.Button("Select this page", size="sm", min_width=120)
            zip_ = gr.Button("Save as ZIP", size="sm", min_width=120)
            grid = gr.Button("Save as one grid", size="sm", min_width=120)
            favourite = gr.Button("Favourite all", size="sm", min_width=120)
            delete = gr.Button("Delete all", size="sm", min_width=120)
        return cls(several, box, count, page, zip_, grid, favourite, delete, gr.DownloadButton(visible=False))

    @property
    def components(self) -> list[Block]:
        """The components that change with the selection."""
        return [self.box, self.count]

    def tell(self, count: int | None) -> Updates:
        """Say how many pictures are selected. None: the user selects one at a time."""
        text = NONE_SELECTED if not count else f"{count} selected"
        return {self.box: gr.update(visible=count is not None), self.count: note(text)}


@dataclass(frozen=True)
class HistoryTab:
    session: gr.State
    page: gr.Number
    status: gr.HTML
    undo: gr.Button
    filters: Filters
    selection: Selection
    stage: Stage
    panel: Panel
    kept: int  # bytes of files for downloads

    @classmethod
    def build(cls, tab: gr.Tab, tabs: gr.Tabs, draw: DrawTab, session: gr.State) -> "HistoryTab":
        """Fill `tab`. The settings of a picture can be sent to `draw`, a tab of `tabs`."""
        with gr.Row(equal_height=True):
            filters = Filters.build()
            page = gr.Number(1, minimum=1, precision=0, label="Page", min_width=100, scale=0, elem_id="history-page")
        with gr.Row(equal_height=True):
            status = gr.HTML(note("Your pictures, newest first"), elem_id="history-status")
            undo = gr.Button("Undo", size="sm", scale=0, min_width=80, visible=False, elem_id="undo")
            filters.only_favourites.render()
            several = gr.Checkbox(label="Select several", container=False, scale=0, min_width=150)
        selection = Selection.build(several)
        with gr.Row():
            with gr.Column(scale=3, min_width=300, elem_classes="stage-column"):
                stage = Stage.build("History", "history", view=GRID)
                with stage.bar:
                    previous = gr.Button("Previous", size="sm", scale=0, min_width=90, elem_id="previous")
                    following = gr.Button("Next", size="sm", scale=0, min_width=90, elem_id="next")
            with gr.Column(scale=2, min_width=300):
                panel = Panel.build()
        with panel.buttons:
            favourite = gr.Button("Favourite", size="sm", min_width=140, elem_id="favourite")
            delete = gr.Button("Delete", size="sm", min_width=140, elem_id="delete")
        history = cls(session, page, status, undo, filters, selection, stage, panel, draw.form.limits.kept)
        history._connect(tab, tabs, draw)
        for button, act in (
            (previous, history.previous),
            (following, history.following),
            (favourite, history.favourite),
            (selection.favourite, history.favourite),
            (delete, history.delete),
            (selection.delete, history.delete),
        ):
            history._on(button.click, act, [panel.chosen])
        return history

    def _on(self, event: Callable[..., Any], act: Callable[..., Updates], inputs: Sequence[Any] = ()) -> Any:
        """Call `act` with the session, the page and `inputs` on an event."""
        return event(act, [self.session, self.page, *inputs], self.shown, preprocess=False, **QUICK)

    def _connect(self, tab: gr.Tab, tabs: gr.Tabs, draw: DrawTab) -> None:
        stage, panel, selection = self.stage, self.panel, self.selection
        self._on(tab.select, self.show)
        self._on(self.page.submit, self.show)
        timer = gr.Timer(REFRESH, active=False)
        timer.tick(self.refresh, [self.session, panel.chosen], self.shown, preprocess=False, **QUICK)
        tabs.select(_is_open, None, timer, **QUICK)
        text, *fields = self.filters.fields
        gr.on(
            [text.change, *(field.input for field in fields)],  # Gradio sends no `input` for pasted text
            self.filter,
            [self.session, text, *fields],
            self.shown,
            trigger_mode="always_last",
            preprocess=False,
            **QUICK,
        )
        self._on(self.undo.click, self.restore)
        self._on(selection.several.input, self.select_several, [selection.several])
        for button, write in ((selection.zip, self.write_zip), (selection.grid, self.write_grid)):
            button.click(write, self.session, [selection.file, self.status], **QUICK).then(
                None, selection.file, None, js=DOWNLOAD, **QUICK
            )
        panel.follow(stage, self.session, lambda session: session.listed if session.selected is None else [])
        marked = [stage.gallery, self.status, *selection.components]
        selection.page.click(self.select_page, self.session, marked, **QUICK)
        picked = stage.gallery.select(self.pick, self.session, marked, **QUICK)
        picked.then(None, stage.view, stage.gallery, js=CLOSE, **QUICK)  # so that the next click is a change
        used = panel.use.click(draw.use, panel.chosen, draw.shown, **QUICK)
        for restored in (used.then, draw.upload.upload):
            restored(lambda: (gr.update(selected="draw"), gr.update(active=False)), None, [tabs, timer], **QUICK)

    @property
    def shown(self) -> list[Block]:
        """The components that change with the pictures."""
        own = [self.status, self.undo, self.page, self.stage.gallery, self.stage.view, *self.panel.components]
        return [*own, self.filters.model, self.filters.day, *self.selection.components]

    def show(self, session: Session, page: float | None, request: gr.Request) -> Updates:
        """Show a page of the pictures; a number out of range gives the nearest page."""
        shelf, number = session.shelf(request), _page_number(page)
        found = shelf.find(session.search, PAGE_SIZE * (number - 1), PAGE_SIZE)
        pages = max(1, math.ceil(found.total / PAGE_SIZE))
        if number > pages:
            return self.show(session, pages, request)
        session.page = number
        session.listed = [drawn for path in found.paths if (drawn := _read(shelf.folder / path))]
        count = f"{number_of_pictures(found.total)}, newest first; page {number} of {pages}"
        return {
            self.status: note(count),
            self.page: gr.update(value=number, maximum=pages),
            **self._stage(session, shelf),
            self.stage.view: GRID,
            **self.panel.hide(),
            **self.filters.offer(found),
            **self.selection.tell(None if session.selected is None else len(session.selected)),
        }

    def filter(
        self, session: Session, text: Any, model: Any, day: Any, only_favourites: Any, request: gr.Request
    ) -> Updates:
        """Show the first page of the pictures that the fields choose."""
        before, session.search = session.search, Search.of_page(text, model, day, only_favourites)
        is_new = session.search != before  # Gradio also sends an event when the focus leaves a list
        return self.show(session, 1, request) if is_new else {self.status: gr.skip()}

    def refresh(self, session: Session, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Show the page with new pictures; an enlarged picture stays enlarged."""
        before, is_late = session.listed, session.deletion is not None and time.monotonic() >= session.deletion[1]
        late: Updates = {self.undo: gr.update(visible=False)} if is_late else {}
        session.deletion = None if is_late else session.deletion
        updates = self.show(session, session.page, request)
        if session.listed == before:
            return late or {self.status: gr.skip()}
        if chosen in session.listed:
            updates |= self._stage(session, session.shelf(request), session.listed.index(chosen))
            kept = {self.stage.view, *self.panel.components}
            updates = {key: value for key, value in updates.items() if key not in kept}
        return updates | late

    def previous(self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Show the picture before the enlarged one, which may be on the page before."""
        return self._step(session, page, chosen, request, -1)

    def following(self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Show the picture after the enlarged one, which may be on the page after it."""
        return self._step(session, page, chosen, request, 1)

    def _step(
        self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request, by: int
    ) -> Updates:
        if session.selected is not None:
            return {self.status: gr.skip()}
        shelf, number = session.shelf(request), _page_number(page)
        first = -1 if by > 0 else len(session.listed)
        place = by + (session.listed.index(chosen) if chosen in session.listed else first)
        if 0 <= place < len(session.listed):
            return self._enlarge(session, shelf, place)
        before = session.listed
        updates = self.show(session, number + by, request) if number + by >= 1 else {}
        is_end = session.listed == before
        return updates | self._enlarge(session, shelf, len(before) if (by < 0) ^ is_end else 0)

    def favourite(self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Make the selected pictures favourites, or none of them if all are."""
        shelf = session.shelf(request)
        try:
            wanted = _wanted(session, chosen)
            is_added = shelf.favourites.switch([drawn.path for drawn in wanted])
        except PROBLEMS as error:
            return {self.status: problem(error)}
        place = session.listed.index(chosen) if chosen in session.listed else None
        updates = self.show(session, page, request)
        if session.selected is None and place is not None:
            updates |= self._enlarge(session, shelf, place)
        what = "Added {} to the favourites" if is_added else "Removed {} from the favourites"
        return updates | {self.status: note(what.format(number_of_pictures(len(wanted))))}

    def delete(self, session: Session, page: float | None, chosen: Drawn | None, request: gr.Request) -> Updates:
        """Move the selected pictures into the bin, and show the next one."""
        shelf = session.shelf(request)
        try:
            wanted = _wanted(session, chosen)
            place = session.listed.index(chosen) if chosen in session.listed else 0
            session.deletion = shelf.delete([drawn.path for drawn in wanted]), time.monotonic() + UNDO
        except PROBLEMS as error:
            return {self.status: problem(error)}
        is_one = session.selected is None
        session.selected = None if is_one else []
        updates = self.show(session, page, request) | (self._enlarge(session, shelf, place) if is_one else {})
        told = note(f"Deleted {number_of_pictures(len(wanted))}")
        return updates | {self.status: told, self.undo: gr.update(visible=True)}

    def restore(self, session: Session, page: float | None, request: gr.Request) -> Updates:
        """Undo the last deletion, and show the first of its pictures if it is on the page."""
        shelf, hidden = session.shelf(request), {self.undo: gr.update(visible=False)}
        try:
            restored = shelf.bin.restore(session.deletion[0]) if session.deletion else []
        except PROBLEMS as error:
            return {self.status: problem(error)}
        session.deletion = None
        updates = self.show(session, page, request)
        places = [place for place, drawn in enumerate(session.listed) if drawn.path in restored]
        updates |= self._enlarge(session, shelf, places[0]) if places and session.selected is None else {}
        return updates | hidden | {self.status: note(f"Restored {number_of_pictures(len(restored))}")}

    def select_several(self, session: Session, page: float | None, several: Any, request: gr.Request) -> Updates:
        """Let clicks select pictures, or enlarge them again."""
        session.selected = [] if several is True else None
        updates = self.show(session, page, request)
        updates[self.stage.gallery]["allow_preview"] = session.selected is None
        return updates

    def select_page(self, session: Session, request: gr.Request) -> Updates:
        """Select all pictures that the tab shows."""
        if session.selected is None:
            return {self.status: gr.skip()}
        new = [drawn for drawn in session.listed if drawn not in session.selected]
        return self._select(session, session.shelf(request), [*session.selected, *new])

    def pick(self, session: Session, event: gr.SelectData, request: gr.Request) -> Updates:
        """Select the clicked picture, or deselect it."""
        drawn, selected = clicked(session.listed, event), session.selected
        if drawn is None or selected is None:
            return {self.status: gr.skip()}
        others = [each for each in selected if each != drawn]
        return self._select(session, session.shelf(request), others if drawn in selected else [*selected, drawn])

    def _select(self, session: Session, shelf: Shelf, selected: list[Drawn]) -> Updates:
        if len(selected) > MOST_SELECTED:
            return {self.status: problem(InputError(f"at most {MOST_SELECTED} pictures can be selected"))}
        session.selected = selected
        return self._stage(session, shelf) | self.selection.tell(len(selected))

    def write_zip(self, session: Session, request: gr.Request) -> Updates:
        """Write the selected pictures into a ZIP for the browser."""
        return self._write(session, lambda to, paths: write_zip(to, session.shelf(request).folder, paths, self.kept))

    def write_grid(self, session: Session) -> Updates:
        """Write the selected pictures into one picture for the browser."""
        return self._write(session, write_loose_grid)

    def _write(self, session: Session, write: Callable[[Path, list[Path]], Path]) -> Updates:
        try:
            paths = [drawn.path for drawn in _wanted(session, None)]
            path = write(new_folder(self.kept), paths)
        except PROBLEMS as error:
            return {self.selection.file: None, self.status: problem(error)}
        return {self.selection.file: str(path), self.status: note(f"Saved {number_of_pictures(len(paths))}")}

    def _stage(self, session: Session, shelf: Shelf, place: int | None = None) -> Updates:
        """Show the pictures of the page whose files exist, with marks before their captions, and the one at `place`."""
        chosen = None if place is None else session.listed[place]
        session.listed = [drawn for drawn in session.listed if drawn.path.exists()]
        place = session.listed.index(chosen) if chosen in session.listed else None
        favourites, selected = set(shelf.favourites.read()), session.selected or []
        pictures = []
        for drawn, (path, caption) in zip(session.listed, captioned(session.listed, of_many_runs=True), strict=True):
            star = FAVOURITE if drawn.path.relative_to(shelf.folder).as_posix() in favourites else ""
            pictures.append((path, (SELECTED if drawn in selected else "") + star + caption))
        return self.stage.show(pictures, place)

    def _enlarge(self, session: Session, shelf: Shelf, place: int) -> Updates:
        """Show the picture at `place`, or else the last one."""
        if not session.listed:
            return {}
        place = min(place, len(session.listed) - 1)
        panel = self.panel.show(session.listed[place])
        return self._stage(session, shelf, place) | panel | {self.stage.view: ONE}


def _page_number(value: Any) -> int:
    """Return the number of a page in its field, which may hold anything."""
    return int(min(max(1, value), 2**31)) if isinstance(value, int | float) and value == value else 1


def _wanted(session: Session, chosen: Drawn | None) -> list[Drawn]:
    """Return the selected pictures, or the enlarged one. Raises InputError if there is none."""
    if session.selected is None:
        return [required(chosen)]
    if not session.selected:
        raise InputError("no picture selected; click one first")
    return session.selected


def _is_open(event: gr.SelectData) -> dict[str, Any]:
    """Check for new pictures only while the tab is open."""
    return gr.update(active=event.value == "History")


def _read(path: Path) -> Drawn | None:
    """Read a saved picture. Returns None if it was deleted or damaged."""
    try:
        record = png.without_half_pairs(png.read_settings(str(path)))
        if AXES in record:
            Axes.from_record(record[AXES], path.name)
    except InputError:
        return None
    return Drawn(path, record) if "seed" in record else None

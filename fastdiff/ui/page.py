"""The page: its tabs, the form that survives a reload, and the API."""

import copy
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.requests import defaults
from fastdiff.ui.api import add_api
from fastdiff.ui.compare_tab import CompareTab
from fastdiff.ui.draw_tab import DrawTab
from fastdiff.ui.drawing import Session
from fastdiff.ui.history_tab import HistoryTab
from fastdiff.ui.parts.draw_fields import SHOW
from fastdiff.ui.parts.examples import fit_examples
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.queueing.messages import PROBLEMS
from fastdiff.ui.queueing.running import LATER, QUICK, SOON, Updates, list_runs, watch_server
from fastdiff.ui.serving.failures import CheckedBlocks
from fastdiff.ui.serving.store import MAX_AGE, Store
from fastdiff.ui.shared import Shared
from fastdiff.ui.starting import editor_of


def build_page(shared: Shared, limits: Limits, store: Store) -> gr.Blocks:
    """Build the page and its API, not yet served. `store` keeps the pictures."""
    card = shared.catalogue.card(defaults.MODEL)
    with CheckedBlocks(title="fastdiff", analytics_enabled=False, delete_cache=(3600, MAX_AGE)) as page:
        gr.Markdown(
            "# fastdiff\nPictures from diffusion models. The same settings and seed always give the same picture."
        )
        session, timer = gr.State(Session(store)), gr.Timer(LATER)
        with gr.Tabs() as tabs:
            with gr.Tab("Draw", id="draw"):
                draw = DrawTab.build(shared, card, limits, session, timer)
            with gr.Tab("Compare", id="compare"):
                compare = CompareTab.build(shared, card, limits, session, timer)
            with gr.Tab("History", id="history", elem_id="history-tab") as history_tab:
                history = HistoryTab.build(history_tab, tabs, draw, session)
        for panel in (draw.panel, history.panel):
            panel.send.click(compare.send, panel.chosen, compare.shown, **QUICK).then(
                lambda: gr.update(selected="compare"), None, tabs, **QUICK
            )
            for button, masked in ((panel.start, False), (panel.paint, True)):
                inputs: set[Block] = {panel.chosen, draw.form.model, draw.starting.guidance}
                begin = draw.starting.start_from(panel.chosen, masked=masked)
                # the tab first: in a hidden one, the mask's editor would have no size
                button.click(lambda: gr.update(selected="draw"), None, tabs, **QUICK).then(
                    begin, inputs, draw.shown, preprocess=False, **QUICK
                ).then(None, js=SHOW, **QUICK)
            panel.upscale.click(draw.upscale, [session, panel.chosen], [draw.status, timer], **QUICK).then(
                lambda: gr.update(selected="draw"), None, tabs, **QUICK
            )
        for result in compare.results:
            result.use.click(draw.use, result.drawn, draw.shown, **QUICK).then(
                lambda: gr.update(selected="draw"), None, tabs, **QUICK
            )
        _keep_form(page, draw)
        _follow_queue(page, draw, compare)
        add_api(page, shared, limits, store)
        pickers = [side.model for form in (draw.form, compare.form) for side in form.sides]
        page.load(
            lambda: [gr.update(choices=shared.catalogue.names())] * len(pickers),
            None,
            pickers,
            **QUICK,
        )
    return page.queue(api_open=False)


def _follow_queue(page: gr.Blocks, draw: DrawTab, compare: CompareTab) -> None:
    """Show the runs of the user, whichever tab or page has started them, and let the user cancel each."""
    queue, state, timer = draw.shared.queue, draw.session, draw.timer
    lists = [draw.controls.runs, compare.controls.runs]

    def watch(session: Session, view: str, request: gr.Request) -> Updates:
        """Return what has changed since the last look."""
        owner = session.owner(request)
        runs = list_runs(queue, owner)
        updates = draw.follow(session, request, view) | compare.follow(session, request)
        updates |= dict.fromkeys(lists, runs) | {timer: gr.update(value=SOON if runs else LATER)}
        changed = {key: value for key, value in updates.items() if session.sent.get(key, ...) != value}
        session.sent |= {key: copy.copy(value) for key, value in changed.items()}  # Gradio modifies updates
        return changed or {timer: gr.skip()}

    def cancel(session: Session, event: gr.EventData, request: gr.Request) -> Updates:
        """Cancel one of the user's runs."""
        owner = session.owner(request)
        queue.cancel(owner, str(getattr(event, "run", "")))
        return dict.fromkeys(lists, list_runs(queue, owner))

    gr.on(
        [timer.tick, page.load],
        watch,
        [state, draw.stage.view],
        [*draw.followed, *compare.followed, *lists, timer],
        **QUICK,
    )
    for each in lists:
        each.click(cancel, state, lists, **QUICK)
    watch_server(page, [draw.status, compare.status], timer)


def _keep_form(page: gr.Blocks, draw: DrawTab) -> None:
    """Save the form of the Draw tab in the browser whenever it changes, and restore it when the page opens."""
    form = draw.form
    fields: list[Component] = [field for field in form.components if not isinstance(field, gr.State)]
    kept = gr.BrowserState(None, storage_key="fastdiff-form", secret="fastdiff")  # constant: readable after a restart

    def restore(values: Any) -> Updates:
        try:
            data = dict.fromkeys(form.components) | dict(zip(fields, values or (), strict=True))
            styles = form.boxes.known_styles(form.catalogue, data)
            asked = form.known_files(form.request(data | {form.boxes.styles: []}))
            card = draw.prepare(asked).card  # raises if it cannot be drawn
            own = {form.batch_size: asked.batch_size} | form.axes.fit(card, data)
            updates = form.show_request(card, asked, editor_of(asked, form.limits)) | own
            updates[form.boxes.styles]["value"] = styles
            return updates | {draw.examples: fit_examples(card)}
        except (*PROBLEMS, ValueError, TypeError):  # nothing is saved, or another version saved it
            return {draw.status: gr.skip()}

    gr.on(
        [field.change for field in fields],  # type: ignore[attr-defined]  # every field with a value has `change`
        None,
        fields,
        kept,
        js="(...values) => [values.map((value) => value?.path ?? value)]",  # of a picture, its path
        api_visibility="private",
    )
    page.load(restore, kept, draw.shown, **QUICK)

"""The page: its tabs, and what the API names."""

import gradio as gr

from fastdiff.requests import defaults
from fastdiff.ui.api import add_api
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.serving.failures import CheckedBlocks
from fastdiff.ui.session import MAX_AGE, Session
from fastdiff.ui.store import Store
from fastdiff.ui.tabs.compare_tab import CompareTab
from fastdiff.ui.tabs.draw_tab import DrawTab
from fastdiff.ui.tabs.history_tab import HistoryTab
from fastdiff.ui.tabs.reload import keep_form
from fastdiff.ui.tabs.running import QUICK


def build_page(models: Models, limits: Limits, store: Store) -> gr.Blocks:
    """The page and its API, not yet served. `models` are shared by everybody who opens it; `store` keeps pictures."""
    card = models.card(defaults.MODEL)
    with CheckedBlocks(title="fastdiff", analytics_enabled=False, delete_cache=(3600, MAX_AGE)) as page:
        gr.Markdown(
            "# fastdiff\nPictures from diffusion models. The same settings and seed always give the same picture."
        )
        session = gr.State(Session(store))
        with gr.Tabs() as tabs:
            with gr.Tab("Draw", id="draw"):
                draw = DrawTab.build(models, card, limits, session)
            with gr.Tab("Compare", id="compare"):
                compare = CompareTab.build(models, card, limits, session)
            with gr.Tab("History", id="history", elem_id="history-tab") as history_tab:
                history = HistoryTab.build(history_tab, tabs, draw, session)
        for panel in (draw.panel, history.panel):
            panel.send.click(compare.send, panel.chosen, compare.shown, **QUICK).then(
                lambda: gr.update(selected="compare"), None, tabs, **QUICK
            )
        for result in compare.results:
            result.use.click(draw.use, result.drawn, draw.shown, **QUICK).then(
                lambda: gr.update(selected="draw"), None, tabs, **QUICK
            )
        keep_form(page, draw)
        add_api(models, limits, store)
        pickers = [draw.form.model, *(side.model for side in compare.sides)]
        page.load(
            lambda: [gr.update(choices=models.names())] * len(pickers),
            None,
            pickers,
            **QUICK,
        )
    return page.queue(api_open=False, max_size=limits.waiting, default_concurrency_limit=1)  # nothing passes the queue

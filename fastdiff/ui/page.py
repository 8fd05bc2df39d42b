"""The page: its tabs, its look, and what the API names."""

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

# stronger contrast than Gradio's own: at least 4.5 to 1
THEME = gr.themes.Default(primary_hue="indigo").set(
    body_text_color_subdued="*neutral_500",
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
    button_cancel_background_fill="#dc2626",
    button_cancel_background_fill_hover="#b91c1c",
)

CSS = """
.bar { height: 10px; margin-bottom: 6px; border-radius: 5px; background: var(--border-color-primary); overflow: hidden }
.bar div { height: 100%; background: var(--primary-500) }
.problem { color: var(--error-text-color); background: var(--error-background-fill);
           border: 1px solid var(--error-border-color); border-radius: var(--radius-sm); padding: 8px 12px }
.previews { display: flex; flex-wrap: wrap; gap: 8px }
.previews img { width: 176px; max-width: 46%; border-radius: var(--radius-sm) }
.settings { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0 }
.settings dt { color: var(--body-text-color-subdued) }
.settings dd { margin: 0; overflow-wrap: anywhere }
.row:has(> .form:empty) { display: none }
.block.tokens { padding: 4px 16px 10px !important; background: var(--block-background-fill) }
.tokens div { font-size: var(--text-sm); overflow-wrap: anywhere }
.tokens .cut { color: var(--error-text-color) }
.enlarged img { width: 100%; height: 100%; object-fit: contain }
@media (max-width: 640px) { .grid-container { --grid-cols: 2 !important } }
"""

# Gradio opens a list at any key, Tab too, which leaves it open over the form
JS = """
() => addEventListener("keydown", (event) => {
    const draws = event.key === "Enter" && (event.ctrlKey || event.metaKey);
    if (draws || (event.key === "Tab" && event.target.role === "combobox")) event.stopPropagation();
    if (draws) [...document.querySelectorAll("button.primary")].find((button) => button.checkVisibility())?.click();
}, true)
"""


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
                HistoryTab.build(history_tab, tabs, draw, session)
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

"""The History tab: all pictures of this visit, the newest first."""

from typing import Any

import gradio as gr

from fastdiff.ui.drawn import Drawn
from fastdiff.ui.session import Session
from fastdiff.ui.tabs.draw_tab import DrawTab
from fastdiff.ui.tabs.gallery import Panel, build_gallery, gallery_value
from fastdiff.ui.tabs.running import QUICK

REFRESH = 1.0  # seconds between two looks for new pictures while the tab is open


def build_history(tab: gr.Tab, tabs: gr.Tabs, draw: DrawTab, session: gr.State) -> None:
    """Fill `tab`, which shows the pictures of the session; the settings of one can go to the tab `draw` of `tabs`."""
    gr.Markdown("All pictures of this visit, the newest first. They are gone when you leave: download what you like.")
    gallery = build_gallery("History", "history")
    panel = Panel.build()
    shown, timer = gr.State(0), gr.Timer(REFRESH, active=False)
    inputs, outputs = [session, shown, panel.chosen], [gallery, shown]
    tab.select(_show_new, inputs, outputs, **QUICK)
    timer.tick(_show_new, inputs, outputs, **QUICK)
    tabs.select(_is_open, None, timer, **QUICK)
    panel.follow(gallery, session, lambda session: session.history)
    panel.use.click(draw.use, panel.chosen, draw.shown, **QUICK).then(
        lambda: (gr.update(selected="draw"), gr.update(active=False)), None, [tabs, timer], **QUICK
    )


def _is_open(event: gr.SelectData) -> dict[str, Any]:
    """Look for new pictures while the tab is open only."""
    return gr.update(active=event.value == "History")


def _show_new(session: Session, shown: int, chosen: Drawn | None) -> tuple[dict[str, Any], Any]:
    """The gallery and how many pictures it shows; the one that is enlarged stays."""
    history = session.history
    if len(history) == shown:
        return gr.skip(), gr.skip()
    index = history.index(chosen) if chosen in history else None
    return gr.update(value=gallery_value(history), selected_index=index), len(history)

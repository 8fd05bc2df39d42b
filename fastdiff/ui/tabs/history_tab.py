"""The History tab: all pictures of this visit, the newest first."""

import gradio as gr

from fastdiff.ui.tabs.draw_tab import DrawTab
from fastdiff.ui.tabs.gallery import Panel, build_gallery, gallery_value
from fastdiff.ui.tabs.running import QUICK


def build_history(tab: gr.Tab, tabs: gr.Tabs, draw: DrawTab, session: gr.State) -> None:
    """Fill `tab`, which shows the pictures of the session; the settings of one can go to the tab `draw` of `tabs`."""
    gr.Markdown("All pictures of this visit, the newest first. They are gone when you leave: download what you like.")
    gallery = build_gallery("History", "history")
    panel = Panel.build()
    tab.select(lambda session: gallery_value(session.history), session, gallery, **QUICK)
    panel.follow(gallery, session, lambda session: session.history)
    panel.use.click(draw.use, panel.chosen, draw.shown, **QUICK).then(
        lambda: gr.update(selected="draw"), None, tabs, **QUICK
    )

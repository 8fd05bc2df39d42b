"""Finished pictures: a gallery, and the panel of the one that was clicked."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gradio as gr
from gradio.blocks import Block

from fastdiff.ui.drawn import Drawn
from fastdiff.ui.session import Session
from fastdiff.ui.tabs.controls import Updates
from fastdiff.ui.tabs.running import QUICK

_SHOWN = {
    "seed": "Seed",
    "label": "Label",
    "prompt": "Prompt",
    "negative_prompt": "Negative prompt",
    "model": "Model",
    "num_inference_steps": "Steps",
    "scheduler": "Scheduler",
    "eta": "Eta",
    "guidance_scale": "Guidance",
    "clip_skip": "Clip skip",
    "width": "Width",
    "height": "Height",
    "dtype": "Number format",
    "device": "Device",
}


def build_gallery(label: str, elem_id: str) -> gr.Gallery:
    return gr.Gallery(
        label=label,
        show_label=False,  # it would cover the first picture
        elem_id=elem_id,
        columns=4,
        fit_columns=False,
        object_fit="contain",
        format="png",
        interactive=False,
        buttons=["download", "download_all", "fullscreen"],
    )


def gallery_value(pictures: Sequence[Drawn]) -> list[tuple[str, str]]:
    """Files, so that the settings inside them stay, each with its seed below it."""
    return [(str(drawn.path), f"seed {drawn.record['seed']}") for drawn in pictures]


@dataclass(frozen=True)
class Panel:
    """The settings of a picture, and what can be done with it."""

    box: gr.Column
    settings: gr.HTML
    use: gr.Button
    download: gr.DownloadButton
    chosen: gr.State  # Drawn

    @classmethod
    def build(cls) -> "Panel":
        with gr.Column(visible=False) as box:
            settings = gr.HTML(label="Settings of this picture")
            with gr.Row():
                use = gr.Button("Use these settings")
                download = gr.DownloadButton("Download this picture")
        return cls(box, settings, use, download, gr.State(None))

    @property
    def components(self) -> list[Block]:
        """The components that `show` and `hide` change."""
        return [self.box, self.settings, self.download, self.chosen]

    def follow(self, gallery: gr.Gallery, session: gr.State, pictures: Callable[[Session], list[Drawn]]) -> None:
        """Show the picture of `gallery` that is enlarged; `pictures` gives those that it holds."""

        def show(session: Session, event: gr.SelectData) -> Updates:
            shown = pictures(session)
            return self.show(shown[event.index]) if 0 <= event.index < len(shown) else self.hide()

        gallery.select(show, session, self.components, **QUICK)
        gallery.preview_close(self.hide, None, [self.box, self.chosen], **QUICK)

    def show(self, drawn: Drawn) -> Updates:
        return {
            self.box: gr.update(visible=True),
            self.settings: settings_table(drawn),
            self.download: str(drawn.path),
            self.chosen: drawn,
        }

    def hide(self) -> Updates:
        return {self.box: gr.update(visible=False), self.chosen: None}


def settings_table(drawn: Drawn) -> str:
    """The settings as an HTML list."""
    lines = (
        f"<dt>{name}</dt><dd>{html.escape(str(drawn.record[key]))}</dd>"
        for key, name in _SHOWN.items()
        if drawn.record.get(key) is not None
    )
    return f'<dl class="settings" aria-label="Settings of this picture">{"".join(lines)}</dl>'

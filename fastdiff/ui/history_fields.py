"""The fields of the History tab: which pictures it shows, and what it does with several selected ones."""

from dataclasses import dataclass

import gradio as gr
from gradio.blocks import Block

from fastdiff.ui.history.index import Found
from fastdiff.ui.history.search import MAX_QUERY
from fastdiff.ui.parts.messages import note
from fastdiff.ui.parts.running import Updates

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

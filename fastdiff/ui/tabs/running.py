"""The buttons that start and end a run, and the one queue that all runs wait in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.ui.messages import note

CANCELLED = "Cancelled; what was finished is kept. A step that is under way still goes on to its end."
DEVICE = "device"  # events with this concurrency_id wait for each other
Updates = dict[Block, Any]
QUICK: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}  # of events that compute nothing

_BUSY = """() => {
    [...document.querySelectorAll(".stage-column")].find((stage) => stage.checkVisibility())
        ?.scrollIntoView({block: "nearest", behavior: "smooth"});
    const update = {__type__: "update"};
    return [{...update, value: "Drawing…", interactive: false}, {...update, visible: true}];
}"""
_FREE = """() => {
    const update = {__type__: "update"};
    return [{...update, value: "NAME", interactive: true}, {...update, visible: "hidden"}];
}"""


@dataclass(frozen=True)
class Buttons:
    """A button that starts runs, and one that cancels."""

    start: gr.Button
    cancel: gr.Button

    @classmethod
    def build(cls, name: str) -> "Buttons":
        with gr.Row(elem_classes="actions"):
            return cls(
                gr.Button(name, variant="primary", min_width=100, elem_id=name.lower()),
                gr.Button("Cancel", variant="stop", min_width=100, visible="hidden"),
            )

    @property
    def components(self) -> list[Component]:
        return [self.start, self.cancel]

    @property
    def free(self) -> Updates:
        """The buttons once the run has ended."""
        start = gr.update(value=self.start.value, interactive=True)
        return {self.start: start, self.cancel: gr.update(visible="hidden")}

    def connect(
        self,
        typed: Sequence[gr.Textbox | gr.Number],
        run: Callable,
        inputs: set[Component],
        status: Component,
        outputs: Sequence[Block],
        live: Sequence[Block],
    ) -> None:
        """Start the generator `run` by the first button or by Enter in what is typed; the second ends it at a yield.

        The start button is busy from the click on, and Cancel is there; a run makes them `free` at its end. Cancel
        frees them at once, though a step under way goes on to its end: the next run need not wait for somebody to
        press again.

        status: the line that tells how far the run is. A cancelled run leaves `live` empty.
        """
        for field in typed:  # a button that is busy takes no such click either
            field.submit(None, js=f"() => document.querySelector('#{self.start.elem_id}').click()", **QUICK)
        # before the run, which Gradio would wait for
        self.start.click(None, None, self.components, js=_BUSY, **QUICK)  # at once, also while the run waits
        running = self.start.click(
            run,
            {*inputs},
            [status, *outputs, *self.components],
            trigger_mode="multiple",  # that of a cancelled run may not have ended
            preprocess=False,  # the run checks its values itself, and says which one is wrong
            show_progress_on=status,
            concurrency_id=DEVICE,
            api_visibility="private",
        )
        free = _FREE.replace("NAME", str(self.start.value))
        running.failure(None, None, self.components, js=free, **QUICK)  # the server may be lost
        cancelled: Updates = {status: note(CANCELLED), **self.free}
        cancelled |= {each: None for each in live}
        self.cancel.click(None, cancels=running, **QUICK).then(
            lambda: cancelled, None, [status, *live, *self.components], **QUICK
        )

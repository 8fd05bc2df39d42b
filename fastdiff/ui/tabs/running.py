"""The buttons that start and end a run, and the one queue that all runs wait in."""

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.ui.messages import note

DEVICE = "device"  # events with this concurrency_id wait for each other
QUICK: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}  # of events that compute nothing


def build_buttons(name: str) -> tuple[gr.Button, gr.Button]:
    """A button `name` that starts, and one that cancels."""
    with gr.Row():
        return (
            gr.Button(name, variant="primary", min_width=100, elem_id=name.lower()),
            gr.Button("Cancel", variant="stop", min_width=100),
        )


def connect_buttons(
    buttons: tuple[gr.Button, gr.Button],
    typed: Sequence[gr.Textbox | gr.Number],
    run: Callable,
    inputs: set[Component],
    outputs: Sequence[Block],
    live: Sequence[Block],
) -> None:
    """Start the generator `run` by the first button or by Enter in what is typed; the second ends it at its next yield.

    outputs: the first is the line that tells how far the run is; a cancelled run leaves `live` empty.
    """
    start, cancel = buttons
    status = outputs[0]
    running = gr.on(
        [start.click, *(field.submit for field in typed)],
        run,
        inputs,
        outputs,
        preprocess=False,  # the run checks its values itself, and says which one is wrong
        show_progress_on=status,
        concurrency_id=DEVICE,
        api_visibility="private",
    )
    cancelled = {status: note("Cancelled; what was finished is kept"), **dict.fromkeys(live)}
    cancel.click(None, cancels=running, **QUICK).then(lambda: cancelled, None, [status, *live], **QUICK)

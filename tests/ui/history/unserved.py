"""A page without a server: its events are called in this process, through Gradio's checks and conversions."""

import asyncio
import inspect
import os
from pathlib import Path
from typing import Any

import gradio as gr
import orjson
from gradio.block_function import BlockFunction
from gradio.state_holder import SessionState

from fastdiff.hosting.models import Models
from fastdiff.ui.drawing import Drawn, Session
from fastdiff.ui.page import build_page
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.serving.store import Store
from fastdiff.ui.shared import Shared


class UnservedPage:
    """The page, and the session of one browser tab. Gradio's files are in GRADIO_TEMP_DIR."""

    def __init__(self, outputs: Path, models_dir: Path | None = None) -> None:
        async def build() -> gr.Blocks:  # without an event loop Gradio creates some and never closes them
            return build_page(Shared(Models(models_dir, device="cpu")), Limits(), Store(outputs))

        self._page = asyncio.run(build())
        self._events = {_name(event): event for event in self._page.fns.values() if event.fn}
        self.visit(outputs)

    def visit(self, outputs: Path) -> None:
        """Start a new session, whose pictures are in another folder."""
        self._state = SessionState(self._page)
        self.session = Session(Store(outputs))
        for key, block in self._page.blocks.items():
            if isinstance(block, gr.components.Component):
                block.GRADIO_CACHE = os.environ["GRADIO_TEMP_DIR"]
            if isinstance(block, gr.State) and isinstance(block.value, Session):
                self._state[key] = self.session
        gr.set_static_paths([self.session.store.root])

    def labels(self, event: str) -> list[str]:
        """Return the labels of an event's fields."""
        return [str(getattr(block, "label", "")) for block in self._events[event].inputs]

    def outputs(self, event: str) -> list[str]:
        """Return the labels of the fields that an event updates; "" for a field without a label."""
        return [str(getattr(block, "label", None) or "") for block in self._events[event].outputs]

    def choose(self, event: str, drawn: Drawn) -> None:
        """Choose the picture that an event reads."""
        for block in self._events[event].inputs:
            if isinstance(block, gr.State):
                self._state[block._id] = drawn

    def press(self, event: str, values: dict[str, Any] | None = None, index: Any = None) -> str:
        """Call the event of a function, such as "HistoryTab.show". Returns the JSON that the browser would get.

        values: by label; the other inputs have their first values. index: of the clicked picture.
        """
        function = self._events[event]
        given = values or {}
        inputs = [
            None
            if isinstance(block, gr.State)
            else given.get(getattr(block, "label", ""), getattr(block, "value", None))
            for block in function.inputs
        ]
        request = gr.Request(username=None, session_hash="hash", cookies={}, headers={})
        data = gr.EventData(target=None, _data={"index": index, "value": None})
        self._page.validate_inputs(function, inputs)
        called = self._page.process_api(function, inputs, self._state, request, event_data=data, in_event_listener=True)
        return orjson.dumps(asyncio.run(called)["data"], option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _name(event: BlockFunction) -> str:
    return inspect.unwrap(event.fn).__qualname__ if event.fn else ""


def upload(data: bytes, name: str) -> dict[str, Any]:
    """Save a file as Gradio saves an upload, and return the value of its field."""
    path = Path(os.environ["GRADIO_TEMP_DIR"], "upload", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}, "orig_name": name}

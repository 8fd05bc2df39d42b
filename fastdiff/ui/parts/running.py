"""Runs on the page: the buttons that start and end one, the queue that all wait in, and the turns of their steps."""

import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio.to_thread
import gradio as gr
from gradio.blocks import Block
from gradio.components import Component
from gradio.events import Dependency

from fastdiff.ui.parts.messages import PROBLEMS, note, problem

T = TypeVar("T")
CANCELLED = "Cancelled; what was finished is kept. A step that is under way still goes on to its end."
WAITING = "Waiting for the step of an earlier run to end"
DEVICE = "device"  # events with this concurrency_id wait for each other
_LEFT: ContextVar[threading.Event] = ContextVar("left")  # of the run that a thread computes: set once it is cancelled
Updates = dict[Block, Any]
QUICK: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}  # of events that compute nothing

_SHOW_STAGE = """() => {
    [...document.querySelectorAll(".stage-column")].find((stage) => stage.checkVisibility())
        ?.scrollIntoView({block: "nearest", behavior: "smooth"});
}"""
_BUSY = """() => {
    (window.cancelled ??= {})["ID"] = false;
    (SHOW_STAGE)();
    const update = {__type__: "update"};
    const waiting = '<div role="status">Waiting for its turn</div>';
    return [{...update, value: "Drawing…", interactive: false}, {...update, visible: true}, waiting];
}""".replace("SHOW_STAGE", _SHOW_STAGE)
# Whether the server answers. A server that was started anew knows nothing of this visit, so the page is loaded again;
# the browser keeps the form.
_IS_HERE = """(async () => {
    const {api_prefix, app_id} = window.gradio_config;
    const answer = await fetch(`.${api_prefix}/app_id`).catch(() => null);
    if (answer?.ok && (await answer.json()).app_id !== app_id) location.reload();
    return Boolean(answer?.ok);
})()"""
_PAUSE = "await new Promise((go) => setTimeout(go, 2000))"
_LOST = """() => {
    const comeBack = async () => {
        if (await IS_HERE) return;  // only the run has failed
        do PAUSE; while (!await IS_HERE);
        location.reload();
    };
    comeBack();
    const update = {__type__: "update"};
    const lost = '<div role="alert" class="problem">The server is gone, or has failed; what was finished is kept. ' +
        'Start it if need be, and press NAME again.</div>';
    return [{...update, value: "NAME", interactive: true}, {...update, visible: "hidden"}, lost, EMPTY];
}""".replace("IS_HERE", _IS_HERE).replace("PAUSE", _PAUSE)
_CANCEL = """() => { window.cancelled["ID"] = true; }"""
# Gradio may report a cancelled run as a failed one. The script then never returns: even an empty update would replace
# another that comes at the same time.
_FAILED = """() => window.cancelled["ID"] ? new Promise(() => {}) : (LOST)()"""
# Gradio triggers no event when it cannot reach the server. The script returns only if the server is gone.
_WATCH = """async () => {
    do {
        if (!await IS_HERE) return (LOST)();
        PAUSE;
    } while (document.querySelector("#ID").disabled);
    return new Promise(() => {});
}""".replace("IS_HERE", _IS_HERE).replace("PAUSE", _PAUSE)


class Cancelled(Exception):
    """The run was cancelled; nobody waits for it."""


class Turns:
    """The steps of all runs, each computed alone."""

    def __init__(self) -> None:
        self._step = threading.Lock()  # held by the step under way

    @property
    def are_taken(self) -> bool:
        """Whether a step is under way: a run that starts now waits for its end."""
        return self._step.locked()

    def take(self, steps: Iterator[T]) -> Iterator[T]:
        """Pass the steps of a run on, each computed alone: a step of a cancelled run goes on to its end.

        Raises Cancelled instead of beginning another step of a cancelled run.
        """
        left = _LEFT.get(threading.Event())
        while True:
            with self._step:
                if left.is_set():
                    raise Cancelled
                step = next(steps, None)
            if step is None:
                return
            yield step


def left_by_cancel(run: Callable) -> Callable:
    """Make the generator `run` one that a cancellation leaves at once; its step under way ends in a thread.

    No other step follows. Gradio would wait for that end, and then take the run that started meanwhile for the
    cancelled one.
    """

    @functools.wraps(run)
    async def steps(*args: Any, **options: Any) -> AsyncIterator[Any]:
        generator, left = run(*args, **options), threading.Event()

        def step() -> Any:
            _LEFT.set(left)
            return next(generator, None)

        try:
            while (updates := await anyio.to_thread.run_sync(step)) is not None:
                yield updates
        finally:
            left.set()

    return steps


def starting(turns: Turns) -> str:
    """HTML: the line of a run whose first step has not ended."""
    return note(WAITING if turns.are_taken else "Starting")


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
    def press(self) -> str:
        """The script that presses the first button; one that is busy takes no such click either."""
        return f"() => document.querySelector('#{self.start.elem_id}').click()"

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
    ) -> Dependency:
        """Start the generator `run` by the first button or by Enter in what is typed; the second ends it at a yield.

        The start button is busy from the click on, and Cancel is there; a run makes them `free` at its end. Cancel
        frees them at once, though a step under way goes on to its end: the next run need not wait for somebody to
        press again.

        status: the line that tells how far the run is, or which of PROBLEMS ended it. A run that is cancelled or fails
        leaves `live` empty. Returns the run's event.
        """

        @functools.wraps(run)
        def explained(*args: Any) -> Iterator[Updates]:
            try:
                yield from run(*args)
            except PROBLEMS as error:
                yield {status: problem(error), **dict.fromkeys(live, ""), **self.free}

        for field in typed:
            field.submit(None, js=self.press, **QUICK)
        watched = [*self.components, status, *live]
        lost = _LOST.replace("NAME", str(self.start.value)).replace("EMPTY", ", ".join(["''"] * len(live)))
        busy_script, cancel, failed, watch = (
            script.replace("LOST", lost).replace("ID", str(self.start.elem_id))
            for script in (_BUSY, _CANCEL, _FAILED, _WATCH)
        )
        # at once, also while the run waits; and before the run, which Gradio would wait for
        busy = self.start.click(None, None, [*self.components, status], js=busy_script, **QUICK)
        busy.then(None, None, watched, js=watch, **QUICK)
        running = self.start.click(
            left_by_cancel(explained),
            {*inputs},
            [status, *outputs, *self.components],
            trigger_mode="multiple",  # an event of a cancelled run may not have ended
            preprocess=False,  # the run checks its values itself, and says which one is wrong
            show_progress_on=status,
            concurrency_id=DEVICE,
            api_visibility="private",
        )
        running.success(None, js=_SHOW_STAGE, **QUICK)  # the page may have grown on the way
        running.failure(None, None, watched, js=failed, **QUICK)

        def tell() -> Updates:  # Gradio changes the updates that it is given
            return {status: note(CANCELLED), **self.free, **dict.fromkeys(live)}

        self.cancel.click(None, js=cancel, **QUICK)
        self.cancel.click(None, cancels=running, **QUICK).then(tell, None, [status, *live, *self.components], **QUICK)
        return running

"""Runs on the page: the buttons that start and cancel a run, the shared queue, and the lock around each step."""

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
CANCELLED = "Cancelled. Finished pictures are kept; the current step is still finishing."
WAITING = "Waiting for the step of an earlier run to finish"
DEVICE = "device"  # events with this concurrency_id run one at a time
_LEFT: ContextVar[threading.Event] = ContextVar("left")  # of the run that the thread computes; set when it is cancelled
Updates = dict[Block, Any]
QUICK: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}  # options of events that compute nothing

_SHOW_STAGE = """() => {
    [...document.querySelectorAll(".stage-column")].find((stage) => stage.checkVisibility())
        ?.scrollIntoView({block: "nearest", behavior: "smooth"});
}"""
_BUSY = """() => {
    (window.cancelled ??= {})["ID"] = false;
    (SHOW_STAGE)();
    const update = {__type__: "update"};
    const waiting = '<div role="status">Waiting in the queue</div>';
    return [{...update, value: "Drawing…", interactive: false}, {...update, visible: true}, waiting];
}""".replace("SHOW_STAGE", _SHOW_STAGE)
# Whether the server answers. A restarted server does not know this session, so the page reloads; the browser keeps the
# form.
_IS_HERE = """(async () => {
    const {api_prefix, app_id} = window.gradio_config;
    const answer = await fetch(`.${api_prefix}/app_id`).catch(() => null);
    if (answer?.ok && (await answer.json()).app_id !== app_id) location.reload();
    return Boolean(answer?.ok);
})()"""
_PAUSE = "await new Promise((go) => setTimeout(go, 2000))"
_LOST = """() => {
    const comeBack = async () => {
        if (await IS_HERE) return;  // only the run failed
        do PAUSE; while (!await IS_HERE);
        location.reload();
    };
    comeBack();
    const update = {__type__: "update"};
    const lost = '<div role="alert" class="problem">The run failed, or the server is down. ' +
        'Finished pictures are kept. If needed, restart the server; then press NAME again.</div>';
    return [{...update, value: "NAME", interactive: true}, {...update, visible: "hidden"}, lost, EMPTY];
}""".replace("IS_HERE", _IS_HERE).replace("PAUSE", _PAUSE)
_CANCEL = """() => { window.cancelled["ID"] = true; }"""
# Gradio may report a cancelled run as a failed one. The script then never returns: even an empty update would replace
# a simultaneous one.
_FAILED = """() => window.cancelled["ID"] ? new Promise(() => {}) : (LOST)()"""
# Gradio triggers no event when it cannot reach the server. The script returns only if the server is down.
_WATCH = """async () => {
    do {
        if (!await IS_HERE) return (LOST)();
        PAUSE;
    } while (document.querySelector("#ID").disabled);
    return new Promise(() => {});
}""".replace("IS_HERE", _IS_HERE).replace("PAUSE", _PAUSE)


class Cancelled(Exception):
    """The run was cancelled, and nobody waits for it."""


class Turns:
    """The lock that computes the steps of all runs one at a time."""

    def __init__(self) -> None:
        self._step = threading.Lock()  # held by the running step

    @property
    def are_taken(self) -> bool:
        """Whether a step is running. A run that starts now waits for it to finish."""
        return self._step.locked()

    def take(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the steps of a run, each computed alone. A cancelled run still finishes its current step.

        Raises Cancelled instead of starting another step of a cancelled run.
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
    """Make the generator `run` return at once when it is cancelled, while its current step finishes in a thread.

    No other step follows. Gradio alone would wait for the step, and then mistake a run that started meanwhile for the
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
    """Return the HTML of the status line before a run's first step has finished."""
    return note(WAITING if turns.are_taken else "Starting")


@dataclass(frozen=True)
class Buttons:
    """The button that starts a run, and the button that cancels it."""

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
        """A script that clicks the start button. A busy button ignores the click."""
        return f"() => document.querySelector('#{self.start.elem_id}').click()"

    @property
    def free(self) -> Updates:
        """The updates of the buttons after a run."""
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
        """Connect the buttons to the generator `run`.

        The start button, or Enter in one of the `typed` fields, starts the run. Cancel ends it at a yield. From the
        click on, the start button is busy and Cancel is visible; a run makes them `free` when it ends. Cancel frees
        them at once, while the current step still finishes, so the user can start the next run without waiting.

        status: the line that shows the progress of the run, or which of PROBLEMS ended it. A run that is cancelled or
        fails leaves `live` empty. Returns the run's event.
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
        # works at once while the run is queued; added first, because Gradio would wait for the run
        busy = self.start.click(None, None, [*self.components, status], js=busy_script, **QUICK)
        busy.then(None, None, watched, js=watch, **QUICK)
        running = self.start.click(
            left_by_cancel(explained),
            {*inputs},
            [status, *outputs, *self.components],
            trigger_mode="multiple",  # the event of a cancelled run may still be active
            preprocess=False,  # the run checks its values itself, and its error names the wrong one
            show_progress_on=status,
            concurrency_id=DEVICE,
            api_visibility="private",
        )
        running.success(None, js=_SHOW_STAGE, **QUICK)  # the page may have grown meanwhile
        running.failure(None, None, watched, js=failed, **QUICK)

        def tell() -> Updates:  # built for each call, because Gradio modifies updates
            return {status: note(CANCELLED), **self.free, **dict.fromkeys(live)}

        self.cancel.click(None, js=cancel, **QUICK)
        self.cancel.click(None, cancels=running, **QUICK).then(tell, None, [status, *live, *self.components], **QUICK)
        return running

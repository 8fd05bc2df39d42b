"""Runs on the page: the button that starts one, and the list of the user's runs, each with its own Cancel."""

import functools
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component

from fastdiff.errors import InputError
from fastdiff.ui.queueing.messages import PROBLEMS, note, number_of_pictures, problem
from fastdiff.ui.queueing.queue import Job, Queue, State

CANCELLED = "Cancelled. Finished pictures are kept; the current step may still finish."
FAILED = "The run failed; its finished pictures are kept. The server's log has the reason."
UNSENT = "The server did not take this run. Press the button again; if that does not help, reload the page."
SOON, LATER = 0.25, 2.0  # seconds between two looks at the queue, while the user has runs and otherwise
Updates = dict[Block, Any]
QUICK: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}  # options of events that compute nothing

# Show the stage. Gradio says nothing if the request of a run does not reach the server.
_BEGIN = """async () => {
    [...document.querySelectorAll(".stage-column")].find((stage) => stage.checkVisibility())
        ?.scrollIntoView({block: "nearest", behavior: "smooth"});
    const answer = await fetch(`.${window.gradio_config.api_prefix}/app_id`).catch(() => null);
    return answer ? {__type__: "update"} : UNSENT;
}"""
# The list may move under the mouse: a click counts if the button was pressed for the same run.
_PRESS = """
let pressed;
const runOf = (event) => event.target.closest("button")?.dataset.run;
element.addEventListener("pointerdown", (event) => { pressed = runOf(event); });
element.addEventListener("click", (event) => {
    const run = runOf(event);
    if (run && (!event.detail || run === pressed)) trigger("click", {run});
});"""
# Watch the server. When it is lost, tell so, and reload the page when it is back: the browser keeps the form and the
# server the runs.
_WATCH = """async () => {
    const isHere = async () => {
        const {api_prefix, app_id} = window.gradio_config;
        const answer = await fetch(`.${api_prefix}/app_id`).catch(() => null);
        if (answer?.ok && (await answer.json()).app_id !== app_id) location.reload();
        return Boolean(answer?.ok);
    };
    const pause = () => new Promise((go) => setTimeout(go, 2000));
    do await pause(); while (document.hidden || await isHere());
    (async () => {
        do await pause(); while (!await isHere());
        location.reload();
    })();
    const lost = '<div role="alert" class="problem">The server is down. Finished pictures are kept. ' +
        'If needed, restart the server; then press the button again.</div>';
    return [LOST, {__type__: "update", active: false}];
}"""


def watch_server(page: gr.Blocks, statuses: Sequence[Component], timer: gr.Timer) -> None:
    """Let the page say on each status line that the server is lost, and come back with it."""
    script = _WATCH.replace("LOST", ", ".join(["lost"] * len(statuses)))
    page.load(None, None, [*statuses, timer], js=script, **QUICK)


def title_of(subject: str, count: int) -> str:
    """Return the title of a run of `count` pictures."""
    return f"{subject}, {number_of_pictures(count)}"


def words_of_place(before: int) -> str:
    """Say how many runs are drawn before a waiting one."""
    return "Starting" if not before else f"Waiting for {'1 run' if before == 1 else f'{before} runs'} before it"


def status_of(job: Job, told: Callable[[Job], str]) -> str:
    """Return the HTML of the status line of a run that has started. told: returns it for a finished one.

    It names the run: two runs may end with the same words, and the page only updates what has changed.
    """
    return f'<div data-run="{job.id}">{_words_of(job, told)}</div>'


def _words_of(job: Job, told: Callable[[Job], str]) -> str:
    if job.state is State.RUNNING:
        return next((view.bar for view in reversed(job.views) if view.bar), note("Starting"))
    if job.state is State.CANCELLED:
        return note(CANCELLED)
    if isinstance(job.error, PROBLEMS):
        return problem(job.error)
    return told(job) if job.error is None else problem(InputError(FAILED))


def list_runs(queue: Queue, owner: str) -> str:
    """Return the HTML of the running and the waiting runs of a user."""
    lines = []
    for job in queue.active(owner):
        is_running = job.state is State.RUNNING
        state = f"{100 * job.fraction:.0f} %" if is_running else words_of_place(queue.before(job))
        title = html.escape(job.title)
        lines.append(
            f'<li style="--done: {100 * job.fraction:.1f}%"><span class="title" title="{title}">{title}</span>'
            f'<span class="state">{state}</span>'
            f'<button data-run="{job.id}" aria-label="Cancel {title}">Cancel</button></li>'
        )
    return f'<ul class="runs" aria-label="Your runs">{"".join(lines)}</ul>' if lines else ""


@dataclass(frozen=True)
class RunControls:
    """The button that starts a run, the list of the user's runs, and the line that says why a run was refused."""

    start: gr.Button
    runs: gr.HTML
    refusal: gr.HTML  # not the status line, which tells of the run that is drawn

    @classmethod
    def build(cls, name: str) -> "RunControls":
        with gr.Column(elem_classes="actions"):
            runs = gr.HTML(js_on_load=_PRESS, apply_default_css=False, padding=False, elem_id=f"{name.lower()}-runs")
            refusal = gr.HTML(apply_default_css=False, padding=False)
            return cls(gr.Button(name, variant="primary", min_width=100, elem_id=name.lower()), runs, refusal)

    @property
    def press(self) -> str:
        """A script that clicks the start button."""
        return f"() => document.querySelector('#{self.start.elem_id}').click()"

    def connect(
        self,
        typed: Sequence[gr.Textbox | gr.Number],
        add: Callable[..., Updates],
        inputs: set[Component],
        timer: gr.Timer,
    ) -> None:
        """Connect the button to `add`, which checks a run and adds it to the queue.

        Enter in one of the `typed` fields presses the button. A line above it says which of PROBLEMS `add` raised, or
        that the server did not answer. timer: looks at the queue, soon after a run was added.
        """

        @functools.wraps(add)
        def explained(*args: Any) -> Updates:
            try:
                return {**add(*args), timer: gr.Timer(SOON), self.refusal: ""}
            except PROBLEMS as error:
                return {self.refusal: problem(error)}

        for field in typed:
            field.submit(None, js=self.press, **QUICK)
        unsent = f"`{problem(InputError(UNSENT))}`"
        self.start.click(None, None, self.refusal, js=_BEGIN.replace("UNSENT", unsent), **QUICK)
        # the run checks its values itself, and its error names the wrong one
        added = self.start.click(explained, {*inputs}, [self.refusal, timer], preprocess=False, **QUICK)
        added.failure(None, None, self.refusal, js=f"() => {unsent}", **QUICK)

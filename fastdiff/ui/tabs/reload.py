"""The form of the Draw tab survives a reload: the browser keeps what it holds."""

from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.ui.messages import PROBLEMS
from fastdiff.ui.options import prepare
from fastdiff.ui.tabs.controls import Subject, Updates
from fastdiff.ui.tabs.draw_tab import DrawTab
from fastdiff.ui.tabs.examples import fit_examples
from fastdiff.ui.tabs.form import Form
from fastdiff.ui.tabs.running import QUICK


def keep_form(page: gr.Blocks, draw: DrawTab) -> None:
    """Keep the form in the browser whenever it changes, and fill it in when the page opens."""
    fields: list[Component] = [field for field in draw.form.components if not isinstance(field, gr.State)]
    kept = gr.BrowserState(None, storage_key="fastdiff-form", secret="fastdiff")  # no secret: readable after a restart

    def restore(values: Any) -> Updates:
        try:
            data = dict.fromkeys(draw.form.components) | dict(zip(fields, values or (), strict=True))
            card, updates = _filled(draw.form, data)
            return updates | {draw.examples: fit_examples(card)}
        except (*PROBLEMS, ValueError, TypeError):  # nothing is kept, or it is another version's
            return {draw.status: gr.skip()}

    gr.on(
        [field.change for field in fields],  # type: ignore[attr-defined]  # of all that have a value
        None,
        fields,
        kept,
        js="(...values) => [values]",
        api_visibility="private",
    )
    page.load(restore, kept, draw.shown, **QUICK)


def _filled(form: Form, data: dict[Component, Any]) -> tuple[ModelCard, Updates]:
    """The model in the fields, and the form with their values. InputError for what cannot be drawn."""
    options = form.options(data)
    run = prepare(options, form.models, form.limits)
    label = options.label if run.card.labels and Subject.offers(run.card, options.label) else None
    record = vars(options) | {"num_inference_steps": options.steps, "label": label}
    own = {
        form.seed.lock: bool(data[form.seed.lock]),
        form.num_images: options.num_images,
        form.batch_size: options.batch_size,
    }
    return run.card, form.show(run.card, record) | own

"""Finished pictures: the stage that shows them, the panel of the selected one, and the buttons that save all."""

import html
import io
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from fastdiff.errors import InputError
from fastdiff.pipelines.pil_images import as_rgb
from fastdiff.requests import png
from fastdiff.requests.input_picture import InputPicture
from fastdiff.requests.request import AXES
from fastdiff.ui.drawing import Drawn, Session, write_grid, write_zip
from fastdiff.ui.inputs.axes import Axes
from fastdiff.ui.inputs.uploaded import keep, keep_inputs, without_folder
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.queueing.messages import PROBLEMS, field_name, note, number_of_pictures, problem
from fastdiff.ui.queueing.running import QUICK, Updates
from fastdiff.ui.serving.store import new_folder

MAX_SUBJECT = 60  # characters of a label or prompt in a caption
_SHOWN = (  # settings below a picture, in this order
    "seed", "label", "prompt", "negative_prompt", "model", "lora", "embedding", "num_inference_steps", "scheduler",
    "eta", "guidance_scale", "clip_skip", "width", "height", "init_image", "strength", "mask", "mask_blur",
    "control", "control_image", "control_scale", "control_start", "control_end", "guess_mode", "ip_adapter",
    "ip_adapter_image", "ip_adapter_scale", "image_encoder", "upscale", "upscale_strength", "upscale_mode",
    "guidance_start", "guidance_stop", "prompt_syntax", "emphasis", "dtype", "precision", "device",
)  # fmt: skip
_NO_FIELDS = {  # names of settings that are no option of the API
    "embedding": "Embeddings",
    "num_inference_steps": "Steps",
    "image_encoder": "Image encoder",
    "dtype": "Data type",
    "device": "Device",
}


_VARIED = {  # settings that can differ between pictures, and how a caption shows them
    "model": "{}",
    "num_inference_steps": "{} steps",
    "scheduler": "{}",
    "eta": "eta {}",
    "guidance_scale": "guidance {}",
    "clip_skip": "clip skip {}",
    "precision": "weights {}",
    "negative_prompt": "not {}",
    "lora": "LoRA {}",
    "strength": "strength {}",
    "control_scale": "control scale {}",
    "ip_adapter_scale": "IP-Adapter scale {}",
    "width": "{} wide",
    "height": "{} high",
}
ONE, _, GRID = VIEWS = ("One", "Pixels", "Grid")
CLOSE = f"(view) => ({{__type__: 'update', ...(view === '{GRID}' ? {{selected_index: null}} : {{}})}})"
_COPY = """() => navigator.clipboard.writeText(
    [...document.querySelectorAll("dl[data-text]")].find((each) => each.checkVisibility()).dataset.text)"""
DOWNLOAD = """(file) => {
    if (!file) return;
    const link = document.createElement("a");
    link.href = file.url;
    link.download = file.orig_name;
    link.click();
}"""


@dataclass(frozen=True)
class Stage:
    """Finished pictures: one fills the stage and the others are in a strip below it, or all are in a grid."""

    gallery: gr.Gallery
    view: gr.Radio
    bar: gr.Row  # holds the view buttons

    @classmethod
    def build(cls, label: str, elem_id: str, view: str = ONE) -> "Stage":
        """Build the stage, inside a column of the class stage-column."""
        gallery = gr.Gallery(
            label=label,
            show_label=False,  # it would cover the first picture
            elem_id=elem_id,
            elem_classes="stage",
            height="var(--stage)",
            columns=4,
            fit_columns=False,
            object_fit="contain",
            format="png",
            interactive=False,
            buttons=["download", "fullscreen"],  # download_all can lose its file on a busy machine
        )
        with gr.Row(equal_height=True) as bar:
            views = gr.Radio(VIEWS, value=view, label="View", container=False, elem_id=f"{elem_id}-view")
        return cls(gallery, views, bar)

    def show(self, captioned: Sequence[tuple[str, str]], place: int | None = None) -> Updates:
        """Show pictures with captions, and the one at `place` on the stage; None leaves the stage as it is."""
        chosen: dict[str, Any] = {} if place is None else {"selected_index": place}
        return {self.gallery: gr.update(value=captioned, **chosen)}


def captioned(pictures: Sequence[Drawn], *, of_many_runs: bool = False) -> list[tuple[str, str]]:
    """Return (file, caption) pairs. Files keep the settings inside them; a caption is also the alt text."""
    records = [drawn.record for drawn in pictures if not _is_of_many(drawn.record)]
    varied = [key for key in _VARIED if len({str(record.get(key)) for record in records}) > 1]
    return [(str(drawn.path), _caption(drawn.record, varied, of_many_runs)) for drawn in pictures]


def _caption(record: Mapping[str, Any], varied: Sequence[str], of_many_runs: bool) -> str:
    """Return the seed, the settings that differ, and the label or prompt, which is first among pictures of many runs.

    A tile cuts off the end.
    """
    subject = record.get("label") if record.get("prompt") is None else record["prompt"]
    if AXES in record:
        axes = Axes.from_record(record[AXES], "the sheet")
        words = (f"{field_name(axis.name).lower()} {axis.words}" for axis in axes.chosen.values())
        return textwrap.shorten(f"sheet of {' x '.join(words)}", 2 * MAX_SUBJECT, placeholder="…")
    if _is_of_many(record):
        return textwrap.shorten(f"grid of seeds {_listed(record['seed'])}", 2 * MAX_SUBJECT, placeholder="…")
    name = "" if subject is None else textwrap.shorten(str(subject), MAX_SUBJECT, placeholder="…")
    values = [_VARIED[key].format(_listed(record[key])) for key in varied if record.get(key) is not None]
    values = ["1 step" if value == "1 steps" else value for value in values]
    differing = [f"seed {record['seed']}", *values]
    return ", ".join(filter(None, [name, *differing] if of_many_runs else [*differing, name]))


def _is_of_many(record: Mapping[str, Any]) -> bool:
    """Return whether the record belongs to a sheet or a grid."""
    return AXES in record or isinstance(record.get("seed"), list)


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Panel:
    """The settings of a picture, and the buttons that act on it."""

    box: gr.Column
    buttons: gr.Row
    change: gr.ImageSlider  # from the start picture to this one
    settings: gr.HTML
    use: gr.Button
    start: gr.Button
    paint: gr.Button
    upscale: gr.Button
    send: gr.Button
    download: gr.DownloadButton
    chosen: gr.State  # Drawn

    @classmethod
    def build(cls) -> "Panel":
        with gr.Column(visible=False) as box:
            change = gr.ImageSlider(
                label="Start picture and result (drag to compare)",
                format="png",
                interactive=False,
                max_height=400,
                visible=False,
                elem_classes="change",
            )
            settings = gr.HTML(label="Settings of this picture")
            with gr.Row() as buttons:
                use = gr.Button("Use these settings", size="sm", min_width=140)
                start = gr.Button("Start from this", size="sm", min_width=140)
                paint = gr.Button("Paint a mask", size="sm", min_width=140)
                upscale = gr.Button("Upscale 1.5x", size="sm", min_width=140)
                send = gr.Button("Send to Compare", size="sm", min_width=140)
                copy = gr.Button("Copy settings", size="sm", min_width=140)
                download = gr.DownloadButton("Download this picture", size="sm", min_width=140)
        copy.click(None, js=_COPY, **QUICK)
        return cls(box, buttons, change, settings, use, start, paint, upscale, send, download, gr.State(None))

    @property
    def components(self) -> list[Block]:
        """The components that `show` and `hide` change."""
        return [self.box, self.change, self.settings, self.download, self.chosen]

    def follow(self, stage: Stage, session: gr.State, pictures: Callable[[Session], list[Drawn]]) -> None:
        """Show the settings of the picture on the stage. pictures: returns the pictures that the stage shows."""

        gallery, view = stage.gallery, stage.view

        def show(session: Session, now: str, event: gr.SelectData) -> Updates:
            shown = pictures(session)
            drawn = clicked(shown, event)
            panel = self.hide() if drawn is None else self.show(drawn)
            return panel | {view: ONE if now == GRID and shown else gr.skip()}

        def change(session: Session, now: str, chosen: Drawn | None) -> Updates:
            shown = pictures(session)
            if now == GRID or not shown:
                return {gallery: gr.skip(), **self.hide()}
            place = shown.index(chosen) if chosen in shown else 0
            return {gallery: gr.update(selected_index=place), **self.show(shown[place])}

        gallery.select(show, [session, view], [*self.components, view], **QUICK)
        gallery.preview_close(lambda: {view: GRID, **self.hide()}, None, [view, self.box, self.chosen], **QUICK)
        view.input(change, [session, view, self.chosen], [gallery, *self.components], **QUICK)
        view.input(None, view, gallery, js=CLOSE, **QUICK)  # Gradio leaves None out of an update from Python

    def show(self, drawn: Drawn) -> Updates:
        """Show the settings of a picture, unless its file is gone."""
        if not drawn.path.exists():
            return self.hide()
        return {
            self.box: gr.update(visible=True),
            self.change: _change(drawn),
            self.settings: settings_table(drawn),
            self.download: str(drawn.path),
            self.chosen: drawn,
        }

    def hide(self) -> Updates:
        return {self.box: gr.update(visible=False), self.chosen: None}


def _before(path: Path, record: Mapping[str, Any], most: int) -> Path | None:
    """Return a copy of the picture that the PNG `path` starts from, as large as the PNG; None if it has none.

    Raises InputError as `keep_inputs`, and for data that is no picture.
    """
    name = keep_inputs(path, record, most, ("init_image",))[0].get("init_image")
    if name is None:
        return None
    start = Path(name)
    with without_folder(start):
        image = as_rgb(InputPicture.read(str(start)).open())
    with without_folder(path):
        height, width = InputPicture.read(str(path), pixels=False).size
    buffer = io.BytesIO()
    image.resize((width, height)).save(buffer, format="png", compress_level=1)
    return keep(buffer.getvalue(), "before.png", most)


def _change(drawn: Drawn) -> dict[str, Any]:
    """Return the update of the slider from the start picture to a drawn one. It is hidden without a start picture."""
    try:
        before = None if _is_of_many(drawn.record) else _before(drawn.path, drawn.record, Limits().uploads)
    except PROBLEMS:  # it is damaged, or the space for uploads is full
        before = None
    pair = None if before is None else (str(before), str(drawn.path))
    return gr.update(value=pair, visible=pair is not None)


def clicked(pictures: Sequence[Drawn], event: gr.SelectData) -> Drawn | None:
    """Return the picture that was clicked. None for any other place, which a browser may send."""
    index = event.index
    return pictures[index] if isinstance(index, int) and 0 <= index < len(pictures) else None


def required(chosen: Drawn | None) -> Drawn:
    """Return the selected picture. Raises InputError if none is selected."""
    if chosen is None:
        raise InputError("no picture selected; click one first")
    return chosen


def settings_table(drawn: Drawn) -> str:
    """Return the settings as an HTML list."""
    values = {key: value for key, value in drawn.record.items() if value is not None}
    axes = Axes.from_record(drawn.record.get(AXES, {}), "the sheet")
    for axis in axes.chosen.values():
        values["num_inference_steps" if axis.name == "steps" else axis.name] = axis.words
    lines = (
        f"<dt>{_NO_FIELDS.get(key) or field_name(key)}</dt><dd>{html.escape(_listed(values[key]))}</dd>"
        for key in _SHOWN
        if key in values
    )
    text = html.escape(png.parameters_text(drawn.record)).replace("\n", "&#10;")
    return f'<dl class="settings" aria-label="Settings of this picture" data-text="{text}">{"".join(lines)}</dl>'


@dataclass(frozen=True)
class SaveRun:
    """The buttons that download the pictures of a run: as a ZIP, or as one grid that can be dropped onto the page."""

    bar: gr.Row
    zip: gr.Button
    grid: gr.Button
    file: gr.DownloadButton  # always hidden

    @classmethod
    def build(cls) -> "SaveRun":
        with gr.Row(visible=False, equal_height=True) as bar:
            zip_ = gr.Button("Save as ZIP", size="sm", min_width=120, elem_id="save-zip")
            grid = gr.Button("Save as grid", size="sm", min_width=120, elem_id="save-grid")
        return cls(bar, zip_, grid, gr.DownloadButton(visible=False))

    def connect(self, session: gr.State, status: gr.HTML, most: int) -> None:
        """Let the buttons save the pictures of `session`. most: bytes of files that are kept for downloads."""

        def save(write: Callable[[], Path], said: str) -> Updates:
            try:
                path = write()
            except PROBLEMS as error:
                return {self.file: None, status: problem(error)}
            return {self.file: str(path), status: note(said)}

        def save_zip(session: Session) -> Updates:
            """Write the files of the run into a ZIP for the browser."""
            said = f"Saved {number_of_pictures(len(session.drawn))} as a ZIP"
            return save(lambda: _write_zip(session, most), said)

        def save_grid(session: Session) -> Updates:
            """Write the grid into the folder of the run, where History also finds it."""
            return save(lambda: _write_grid(session), "Saved grid.png; it is also in History")

        for button, write in ((self.zip, save_zip), (self.grid, save_grid)):
            button.click(write, session, [self.file, status], **QUICK).then(None, self.file, None, js=DOWNLOAD, **QUICK)

    @property
    def components(self) -> list[Block]:
        """The components that `show` changes."""
        return [self.bar, self.grid]

    def show(self, session: Session) -> Updates:
        """Show the buttons if there are several pictures. A sheet is a grid already."""
        return {
            self.bar: gr.update(visible=len(session.drawn) > 1),
            self.grid: gr.update(visible=session.run is not None),
        }


def _write_zip(session: Session, most: int) -> Path:
    paths = [drawn.path for drawn in session.drawn]
    if not paths:
        raise InputError("no run to save; draw several pictures first")
    if not all(path.exists() for path in paths):
        raise InputError("a picture of this run was deleted; save the others in History")
    return write_zip(new_folder(most), Path(os.path.commonpath([path.parent for path in paths])), paths, most)


def _write_grid(session: Session) -> Path:
    if session.run is None or not session.drawn:
        raise InputError("no run to save; draw several pictures first")
    return write_grid(session.run, session.drawn)

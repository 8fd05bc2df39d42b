"""The events that put start pictures and others into the form of Draw, and the requests that enlarge a picture."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block
from gradio.components import Component
from PIL import Image

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.pipelines.pil_images import as_rgb
from fastdiff.requests.defaults import UPSCALE_STRENGTH
from fastdiff.requests.input_picture import CONTROL, IMAGE_PROMPT, INIT_IMAGE, InputPicture
from fastdiff.requests.request import AXES
from fastdiff.ui.drawing import Drawn, control_picture, with_files_here
from fastdiff.ui.gallery import required
from fastdiff.ui.inputs.mask import editor_html, mask_at
from fastdiff.ui.inputs.size import size_from
from fastdiff.ui.inputs.uploaded import keep_drawn, keep_inputs, uploaded_path, without_folder
from fastdiff.ui.parts.control_fields import preview_html
from fastdiff.ui.parts.controls import SizeControls
from fastdiff.ui.parts.draw_fields import EDITOR
from fastdiff.ui.parts.examples import fit_examples
from fastdiff.ui.parts.form import DrawForm
from fastdiff.ui.parts.picture_section import NONE
from fastdiff.ui.parts.request import CANNY, Limits, UncheckedRequest
from fastdiff.ui.parts.upload import form_settings, numerics_notice
from fastdiff.ui.queueing.messages import PROBLEMS, note, problem
from fastdiff.ui.queueing.running import QUICK, Updates

STARTS = "Starts from {}. Set the strength, and press Generate."
PAINTS = "Starts from {}. Paint what should change, and press Generate."
CONTROLS = "{} follows {}. Press Generate."
PROMPTS = "{} reads {}. Press Generate."
UPSCALE = 1.5  # of the button
SIDE = 512  # pixels of the longer side in the editor, at least: a small picture is hard to paint on
MOST = 1024  # at most


@dataclass(frozen=True)
class Starting:
    """The form of Draw, and what changes with its start picture."""

    catalogue: Catalogue
    form: DrawForm
    examples: gr.HTML
    status: gr.HTML

    def connect(self) -> None:
        """Connect the events of the form's own fields."""
        start, model, guidance = self.form.start, self.form.model, self.guidance
        size = self.form.sides[0].size.components
        # Gradio would decode the picture
        whole: dict[str, Any] = {"preprocess": False, **QUICK}
        start.picture.upload(self.begin, {start.picture, model}, [*size, *start.shown, self.status], **whole)
        start.picture.clear(self.end, {model, guidance}, [*size, *start.shown, guidance], **whole)
        self._connect_control(whole)
        images = self.form.ip_adapter
        read_image: set[Block] = {*images.components, model}
        images.fields.image.upload(self.begin_image, read_image, [*images.components, self.status], **whole)
        images.fields.image.clear(lambda: NONE, None, images.fields.name, **QUICK)
        masking = [start.strength, start.masks, start.editor, start.mask, start.mask_blur, guidance, self.status]
        read: set[Block] = {start.picture, start.strength, start.masks, model, guidance}
        start.masks.input(self.paint, read, masking, **whole)

    def _connect_control(self, whole: Mapping[str, Any]) -> None:
        control, model, size = self.form.control, self.form.model, self.form.sides[0].size
        fields, sides = control.fields, [size.width, size.height]
        picture = fields.control_image
        others: set[Block] = {fields.control, self.form.start.picture, model}
        shown = [*size.components, control.box, fields.control, picture, self.status]
        picture.upload(self.begin_control, {picture, *others}, shown, **whole)
        picture.clear(self.end_control, others, shown, **whole)
        made_from = [picture, fields.control_preprocessor, fields.canny_low, fields.canny_high, *sides]
        gr.on(
            [field.change for field in made_from],  # type: ignore[attr-defined]  # every field with a value has it
            self.preview,
            {*made_from},
            control.preview,
            trigger_mode="always_last",
            **whole,
        )

    def begin_control(self, data: Mapping[Component, Any]) -> Updates:
        """Take the ControlNet and, without a start picture, the size for the control picture that was dropped."""
        control = self.form.control
        try:
            path = uploaded_path(data[control.fields.control_image], "control_image")
            card = self.catalogue.card(data[self.form.model])
            updates = self._size_from(path, card, CONTROL)
            net, chosen = control.begin(card, data[control.fields.control])
        except PROBLEMS as error:
            return {self.status: problem(error), control.fields.control_image: None}
        updates = updates if data[self.form.start.picture] is None else {}
        return updates | chosen | {self.status: note(CONTROLS.format(net, path.name))}

    def end_control(self, data: Mapping[Component, Any]) -> Updates:
        """Choose no ControlNet, and return to the model's own size, after the control picture was removed."""
        none: Updates = {self.form.control.fields.control: NONE}
        try:
            card = self.catalogue.card(data[self.form.model])
        except PROBLEMS:  # the model no longer exists
            return none
        return none | (self._resized(card, {}) if data[self.form.start.picture] is None else {})

    def begin_image(self, data: Mapping[Component, Any]) -> Updates:
        """Take the IP-Adapter for the image prompt that was dropped."""
        fields = self.form.ip_adapter.fields
        try:
            path = uploaded_path(data[fields.image], "ip_adapter_image")
            with without_folder(path):
                InputPicture.read(str(path), IMAGE_PROMPT)
            card = self.catalogue.card(data[self.form.model])
            adapter, chosen = self.form.ip_adapter.begin(card, data[fields.name])
        except PROBLEMS as error:
            return {self.status: problem(error), fields.image: None}
        return chosen | {self.status: note(PROMPTS.format(adapter, path.name))}

    def preview(self, data: Mapping[Component, Any]) -> str:
        """Return the HTML of the control picture that would be made, or of what is wrong with it."""
        fields, size = self.form.control.fields, self.form.sides[0].size
        if data[fields.control_image] is None or data[fields.control_preprocessor] != CANNY:
            return ""
        values = {name: data[field] for name, field in vars(fields).items() if name.startswith(("canny_", "control_p"))}
        asked = UncheckedRequest(width=data[size.width], height=data[size.height], **values)
        try:
            asked = self.form.limits.check(asked)
            upload = uploaded_path(data[fields.control_image], "control_image")
            return preview_html(control_picture(upload, asked, (asked.height, asked.width), self.form.limits))
        except PROBLEMS as error:
            return problem(error)

    def begin(self, data: Mapping[Component, Any]) -> Updates:
        """Take the size of the start picture that was dropped."""
        try:
            path = uploaded_path(data[self.form.start.picture], "init_image")
            card = self.catalogue.card(data[self.form.model])
            updates = self._size_from(path, card) | self.form.start.begin(card, path)
        except PROBLEMS as error:
            return {self.status: problem(error), self.form.start.picture: None}
        del updates[self.form.start.picture]  # it is there
        return updates | {self.status: note(STARTS.format(path.name))}

    def end(self, data: Mapping[Component, Any]) -> Updates:
        """Return to the model's own size, after the start picture was removed."""
        try:
            card = self.catalogue.card(data[self.form.model])
        except PROBLEMS:  # the model no longer exists
            return {self.form.start.masks: gr.skip()}
        updates = self._resized(card, {}) | self.form.start.show(card, {})
        del updates[self.form.start.picture]
        return updates | self._guided(card, data, masked=False)

    def paint(self, data: Mapping[Component, Any]) -> Updates:
        """Show or hide the mask's editor."""
        start, masked = self.form.start, data[self.form.start.masks] is True
        try:
            path = uploaded_path(data[start.picture], "init_image") if masked else None
            card = self.catalogue.card(data[self.form.model])
            updates = start.paint(editor_value(path) if path else None)
        except PROBLEMS as error:
            return {self.status: problem(error), start.masks: False}
        strength = start.mask_strength(card, data[start.strength], masked=masked)
        updates |= {self.status: note(PAINTS.format(path.name))} if path else {}
        return updates | {start.strength: strength} | self._guided(card, data, masked=masked)

    @property
    def guidance(self) -> gr.Slider:
        return self.form.sides[0].sampling.guidance_scale

    def _guided(self, card: ModelCard, data: Mapping[Component, Any], *, masked: bool) -> Updates:
        """Return the guidance after the mask was turned on or off: the default, unless the user changed it."""
        own, other = (
            self.catalogue.default_sampling(card, masked=each).guidance_scale for each in (masked, not masked)
        )
        return {self.guidance: own} if data[self.guidance] == other else {}

    def start_from(self, chosen: gr.State, *, masked: bool) -> Callable[[Mapping[Component, Any]], Updates]:
        """Return a function that makes the picture in the state `chosen` the start picture; `masked`: to paint on."""

        def start(data: Mapping[Component, Any]) -> Updates:
            try:
                path = keep_drawn(required(data[chosen]).path, self.form.limits.uploads)
                before = self.catalogue.card(data[self.form.model])
                card = _reader_near(before, self.catalogue.cards())
                fitted = self.form.show_request(card, UncheckedRequest(card.name)) if card != before else {}
                fitted |= self._size_from(path, card)
                value = editor_value(path) if masked else None
                fitted |= self.form.start.begin(card, path, value)
                fitted |= self._guided(card, data, masked=masked) if card == before else {}
            except PROBLEMS as error:
                return {self.status: problem(error)}
            fitted |= {self.examples: fit_examples(card)} if card != before else {}
            because = f" Chose {card.name}, because {before.name} reads no prompts." if card != before else ""
            told = (PAINTS if masked else STARTS).format(path.name)
            return fitted | {self.status: note(told + because)}

        return start

    def _size_from(self, path: Path, card: ModelCard, setting: str = INIT_IMAGE) -> Updates:
        """Return the updates that fit the size to a picture. Raises InputError if it is no picture."""
        with without_folder(path):
            size = InputPicture.read(str(path), setting).size
        height, width = size_from(size, card, self.form.limits.side)
        return self._resized(card, {"width": width, "height": height})

    def _resized(self, card: ModelCard, size: Mapping[str, int]) -> Updates:
        return self.form.sides[0].size.updates(SizeControls.properties(card, self.form.limits, size))


def _reader_near(card: ModelCard, cards: Sequence[ModelCard]) -> ModelCard:
    """Return `card`, or a model that reads text if it does not. Raises InputError if there is none."""
    readers = [card, *cards] if card.reads_text else [each for each in cards if each.reads_text]
    if not readers:
        raise InputError("Start picture: no model here reads prompts; only such a model changes pictures")
    return readers[0]


def with_inputs(record: Mapping[str, Any], path: Path, limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """Return the settings `record` of the PNG `path` with copies of the pictures inside it, and lines about the PNG.

    Settings of pictures that are missing become None. A mask comes with the value of its editor. Raises InputError as
    `keep_inputs` and `editor_value`.
    """
    kept, missing = keep_inputs(path, record, limits.uploads)
    if kept.get("mask"):
        kept[EDITOR] = editor_value(Path(kept["init_image"]), Path(kept["mask"]))
    return {**record, **kept}, [*filter(None, [numerics_notice(path)]), *missing]


def larger(chosen: Drawn, catalogue: Catalogue, limits: Limits) -> UncheckedRequest:
    """Return the request for a picture UPSCALE times as large: the same request with `upscale`.

    A picture with a mask, or one that was enlarged before, becomes the start picture of the larger one. The PNG of
    either can be repeated. Raises InputError for a grid or a sheet, and for a picture that cannot be drawn again here.
    """
    if AXES in chosen.record or isinstance(chosen.record.get("seed"), list):
        raise InputError("upscale: this is a sheet of pictures; choose one of them")
    record = form_settings(chosen.record, chosen.path.name, limits)
    record, _ = with_files_here(record, chosen.path.name, catalogue)
    if not catalogue.card(record["model"]).reads_text:
        raise InputError(f"upscale: {record['model']} reads no prompts; start from this picture with another model")
    if chosen.record.get("mask") is None and chosen.record.get("upscale") is None:
        record, missing = with_inputs(record, chosen.path, limits)
        if record.get("init_image") is None and chosen.record.get("init_image") is not None:
            raise InputError(f"upscale: {missing[-1]}")
        return replace(UncheckedRequest.from_record(record), num_images=1, upscale=UPSCALE)
    kept, _ = keep_inputs(chosen.path, record, limits.uploads, ("control_image", "ip_adapter_image"))
    started = dict.fromkeys(("mask", "mask_blur", "init_image", "strength"))
    asked = UncheckedRequest.from_record({**record, **kept, **started})
    multiple = catalogue.card(record["model"]).size_factor
    with without_folder(chosen.path):
        sides = InputPicture.read(str(chosen.path), pixels=False).size
    height, width = (round(UPSCALE * side / multiple) * multiple for side in sides)
    start = {"init_image": str(keep_drawn(chosen.path, limits.uploads)), "strength": UPSCALE_STRENGTH}
    plain: dict[str, Any] = {"upscale": None, "upscale_strength": None, "upscale_mode": None, "num_images": 1}
    return replace(asked, height=height, width=width, **start, **plain)


def editor_of(asked: UncheckedRequest, limits: Limits) -> str | None:
    """Return the editor of a request's mask, or None if it has none. Raises as `mask_at` and `editor_value`."""
    if asked.mask is None:
        return None
    mask = mask_at(asked.mask, limits.uploads) if asked.mask else None
    return editor_value(uploaded_path(asked.init_image, "init_image"), mask)


def editor_value(start: Path, mask: Path | None = None) -> str:
    """Return the HTML of the editor: the start picture, and over it the mask, if there is one.

    Raises InputError for a file that is no picture.
    """
    pictures = []
    for path in filter(None, (start, mask)):
        with without_folder(path):
            pictures.append(as_rgb(InputPicture.read(str(path)).open()))
    factor = min(max(1.0, SIDE / max(pictures[0].size)), MOST / max(pictures[0].size))
    width, height = (max(1, round(factor * side)) for side in pictures[0].size)
    urls = [_url(each.resize((width, height)), form) for each, form in zip(pictures, ("jpeg", "png"), strict=False)]
    return editor_html(urls[0], urls[1] if mask else None, (width, height))


def _url(image: Image.Image, form: str) -> str:
    buffer = io.BytesIO()
    (image if form == "jpeg" else image.convert("L")).save(buffer, form)
    return f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode()}"

"""Masks that users paint over the start picture: white is painted anew.

Gradio's ImageEditor uploads its layers whenever any event of the page begins, so the page has an editor of its own.
"""

import base64
import binascii
from pathlib import Path
from typing import Any

from fastdiff.errors import InputError
from fastdiff.requests.input_picture import InputPicture
from fastdiff.ui.inputs.uploaded import keep, uploaded_path, without_folder

MASK = "mask"  # its name inside a PNG
_NOTHING = "nothing is painted; paint where the picture should change, or turn the mask off"
_PAINTED = "data:image/png;base64,"  # begins what the editor sends
# Paint on the canvas, which is black and white and whose black is transparent in the style sheet. A mask that the page
# restored is a picture until the first stroke. Each stroke triggers `input`, and `window.painted` has the new mask.
PAINT = """
const strokes = [];  // of the canvas, before each
let last, pen;
const canvasOf = () => element.querySelector("canvas");
const begin = () => {
    const canvas = canvasOf(), old = element.querySelector(".old");
    const paper = canvas.getContext("2d", {willReadFrequently: true});
    if (!canvas.dataset.begun) {
        strokes.length = 0;
        paper.fillStyle = "black";
        paper.fillRect(0, 0, canvas.width, canvas.height);
        if (old) paper.drawImage(old, 0, 0, canvas.width, canvas.height);
        old?.remove();
        canvas.dataset.begun = "yes";
    }
    return paper;
};
const keep = (paper) => {
    strokes.push(paper.getImageData(0, 0, paper.canvas.width, paper.canvas.height));
    if (strokes.length > 20) strokes.shift();
};
const send = () => {
    window.painted = canvasOf().toDataURL("image/png");
    trigger("input");
};
const placeOf = (event) => {
    const canvas = canvasOf(), box = canvas.getBoundingClientRect();
    const scale = canvas.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale, scale];
};
const paint = (event) => {
    const [x, y, scale] = placeOf(event);
    pen.lineWidth = scale * element.querySelector("input").value;
    pen.lineCap = "round";
    pen.strokeStyle = element.querySelector("[aria-pressed=true]") ? "black" : "white";
    pen.beginPath();
    pen.moveTo(...last);
    pen.lineTo(x, y);
    pen.stroke();
    last = [x, y];
};
element.addEventListener("pointerdown", (event) => {
    if (event.target !== canvasOf() || event.button) return;
    event.preventDefault();
    event.target.setPointerCapture(event.pointerId);
    pen = begin();
    keep(pen);
    last = placeOf(event).slice(0, 2);
    paint(event);
});
element.addEventListener("pointermove", (event) => { if (pen) paint(event); });
for (const end of ["pointerup", "pointercancel"]) element.addEventListener(end, () => {
    if (pen) send();
    pen = null;
});
element.addEventListener("click", (event) => {
    const button = event.target.closest("button"), act = button?.dataset.act;
    if (act === "erase") button.ariaPressed = String(button.ariaPressed !== "true");
    if (act !== "undo" && act !== "clear") return;
    const paper = begin();
    if (act === "undo" && !strokes.length) return;
    if (act === "undo") paper.putImageData(strokes.pop(), 0, 0);
    else {
        keep(paper);
        paper.fillStyle = "black";
        paper.fillRect(0, 0, paper.canvas.width, paper.canvas.height);
    }
    send();
});"""


def editor_html(start: str, mask: str | None, size: tuple[int, int]) -> str:
    """Return the editor over a start picture, with a mask that was painted before. Both are URLs, of `size`.

    size: (width, height).
    """
    old = "" if mask is None else f'<img class="old" alt="" src="{mask}">'
    return (
        f'<div class="layers"><img alt="Start picture" src="{start}">{old}<canvas width="{size[0]}" height="{size[1]}" '
        'role="img" aria-label="Paint here what should change"></canvas></div><div class="tools">'
        '<label>Brush <input type="range" min="2" max="80" value="24" aria-label="Brush size"></label>'
        '<button type="button" data-act="erase" aria-pressed="false">Erase</button>'
        '<button type="button" data-act="undo">Undo</button><button type="button" data-act="clear">Clear</button></div>'
    )


def mask_at(value: Any, most: int) -> Path:
    """Return a mask as a file beside the uploads, which have at most `most` bytes.

    value: an upload, as `uploaded_path` takes it, or what the editor sends. Raises InputError for anything else, and
    for an editor without a stroke.
    """
    if value in (None, ""):
        raise InputError(f"mask: {_NOTHING}")
    if not isinstance(value, str) or not value.startswith(_PAINTED):
        return uploaded_path(value, "mask")
    try:
        data = base64.b64decode(value.removeprefix(_PAINTED), validate=True)
    except (binascii.Error, ValueError):
        raise InputError("mask: what was painted is damaged; paint it again") from None
    path = keep(data, "mask.png", most)
    with without_folder(path):
        brightest = InputPicture.read(str(path), MASK).brightest()
    if brightest < 128:
        raise InputError(f"mask: {_NOTHING}")
    return path

"""Lines of the page: what was done, and what goes wrong, with the field and the remedy."""

import html
import re

from fastdiff.errors import DeviceLostError, InputError, NonFiniteError

PROBLEMS = (InputError, NonFiniteError, MemoryError, DeviceLostError, OSError)  # what a person can do something about

_FIELDS = {  # names of the API, and their fields on the page
    "model": "Model",
    "label": "Label",
    "seed": "Seed",
    "num_images": "Pictures",
    "steps": "Steps",
    "scheduler": "Scheduler",
    "eta": "Eta",
    "guidance_scale": "Guidance",
    "width": "Width",
    "height": "Height",
    "batch_size": "Batch size",
    "prompt": "Prompt",
    "negative_prompt": "Negative prompt",
    "clip_skip": "Clip skip",
    "precision": "Weights",
}
_OTHER_WORDS = {  # of the command and of Python, and the page's and the API's
    "try --dtype float32, or check": "check",
    "cfg-scale": "guidance_scale",
    "num-images": "num_images",
    "negative-prompt": "negative_prompt",
    "clip-skip": "clip_skip",
    "`fastdiff models MODEL` lists": "the API's /models lists",
    "--": "",
    ": None is not ": " is empty; give ",
}


def explain(error: Exception) -> str:
    """One of PROBLEMS in one line."""
    if isinstance(error, MemoryError):
        return "out of memory: choose smaller pictures (width and height, under More settings), or a smaller model"
    if isinstance(error, OSError):
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error  # ours has a line for the command
        return f"the server cannot keep the picture ({cause.strerror or cause}); make room on its disk"
    text = str(error)
    for theirs, ours in _OTHER_WORDS.items():
        text = text.replace(theirs, ours)
    return text


def field_name(name: str) -> str:
    """The page's word for an option of the API."""
    return _FIELDS.get(name, name)


def number_of_pictures(count: int) -> str:
    """Such as 1 picture, or 1,200 pictures."""
    return "1 picture" if count == 1 else f"{count:,} pictures"


def problem(error: Exception) -> str:
    """HTML: one of PROBLEMS, spoken by a screen reader at once."""
    text = re.sub(r"^\w+(?=[: ])", lambda name: field_name(name[0]), explain(error))
    return f'<div role="alert" class="problem">{html.escape(text, quote=False)}</div>'


def note(text: str) -> str:
    """HTML: a line that a screen reader speaks when it has time."""
    return f'<div role="status">{html.escape(text, quote=False)}</div>'

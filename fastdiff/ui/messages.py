"""Lines of the page: what was done, and what goes wrong, with the field and the remedy."""

import html

from fastdiff.errors import DeviceLostError, InputError, NonFiniteError

PROBLEMS = (InputError, NonFiniteError, MemoryError, DeviceLostError, OSError)  # what a person can do something about


def explain(error: Exception) -> str:
    """One of PROBLEMS in one line."""
    if isinstance(error, MemoryError):
        return "out of memory: choose smaller pictures (width and height, under More settings), or a smaller model"
    if isinstance(error, OSError):
        return f"the server cannot keep the picture ({error.strerror or error}); make room on its disk"
    return str(error)


def problem(error: Exception) -> str:
    """HTML: one of PROBLEMS, spoken by a screen reader at once."""
    return f'<div role="alert" class="problem">{html.escape(explain(error), quote=False)}</div>'


def note(text: str) -> str:
    """HTML: a line that a screen reader speaks when it has time."""
    return f'<div role="status">{html.escape(text, quote=False)}</div>'

"""The errors that fastdiff raises for its users. OutOfMemoryError is in `execution/memory.py`."""

LONGEST = 300  # the most characters of another library's message


class InputError(ValueError):
    """An input that cannot be used. The message is one line that names the input and the remedy.

    The command line prints it without a traceback and exits with 2.
    """


class NonFiniteError(ArithmeticError):
    """NaN or infinity in weights or output. It is never drawn as a black picture. The command line exits with 1."""


class NonFiniteWeightsError(InputError, NonFiniteError):
    """NaN or infinity in weights, which are an input. The command line exits with 2."""


class DeviceLostError(RuntimeError):
    """A GPU that failed and that this process can no longer use. The command line exits with 1."""


def in_one_line(error: BaseException) -> str:
    """Return another library's error as one line: its class, and its message without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST]

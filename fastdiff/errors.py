"""The errors that a user of fastdiff meets (memory's is in `execution/memory.py`), and those of others in one line."""

LONGEST = 300  # characters of another's message


class InputError(ValueError):
    """An input that cannot be used. The message is one line that names the input and the remedy.

    The command line prints it without a traceback and exits with 2.
    """


class NonFiniteError(ArithmeticError):
    """NaN or infinity in weights or output, never drawn as a black picture. The command line exits with 1."""


class DeviceLostError(RuntimeError):
    """A GPU that failed, which this process can use no more. The command line exits with 1."""


def in_one_line(error: Exception) -> str:
    """The kind of an error that is not ours, and its message without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST]

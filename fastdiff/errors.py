"""The two errors that a user of fastdiff meets."""


class InputError(ValueError):
    """An input that cannot be used. The message is one line that names the input and the remedy.

    The command line prints it without a traceback and exits with 2.
    """


class NonFiniteError(ArithmeticError):
    """NaN or infinity in weights or output, never drawn as a black picture. The command line exits with 1."""

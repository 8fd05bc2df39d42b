"""Streams of the process: some may be closed (`>&-`), full, or without a reader; errors and notices as lines."""

import contextlib
import io
import logging
import os
import re
import sys

from fastdiff.errors import InputError

MAX_MESSAGE = 500  # characters of a line; the longest of ours without an input in it has some 300
_LOG = logging.getLogger("fastdiff")  # the library's


def prepare() -> None:
    """Open what is closed, and let any text be printed.

    A closed stream becomes the null device: else the next file that is opened would take its descriptor, and all that
    any library prints would end in that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in a notebook it is something else
            stream.reconfigure(errors="backslashreplace")  # a label need not fit the terminal's encoding


def require_stdout() -> None:
    """InputError where stdout is closed, for whatever would work in vain then."""
    if getattr(sys.stdout, "name", None) == os.devnull:
        raise InputError("stdout is closed, where the answer would go; leave out >&- or name a file behind >")


def drop_unwritten() -> None:
    """Drop what stdout holds where it cannot be written: Python would try once more at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(message: str) -> None:
    """Print a line on stderr, if anybody reads it."""
    with contextlib.suppress(OSError):
        print(f"fastdiff: {message}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` as one line without control characters: a file's name or contents must not drive the terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def error_line(text: str) -> str:
    """`text` as one line of at most MAX_MESSAGE characters.

    Long inputs within it give way first: what is wrong stands before them as a rule, and the remedy behind.
    """
    line = printable(text)
    if len(line) > MAX_MESSAGE:
        line = re.sub(r"\S{121,}", lambda word: f"{word[0][:60]}...{word[0][-20:]}", line)
    if len(line) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2 - 3
        line = f"{line[:half]} ... {line[-half:]}"
    return line


class Notices(logging.Handler):
    """Says each line once, above a progress bar; within its block also those that the library logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def __enter__(self) -> "Notices":
        _LOG.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _LOG.removeHandler(self)

    def say(self, *lines: str) -> None:
        """Print those lines on stderr that were not yet said."""
        from tqdm import tqdm

        for line in lines:
            if line not in self._said:
                self._said.add(line)
                with tqdm.external_write_mode(file=sys.stderr):
                    say(error_line(line))

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

"""The standard streams, which may be closed (`>&-`), full or without a reader, and one-line errors and notices."""

import contextlib
import io
import logging
import os
import re
import sys
from typing import TextIO

from fastdiff.errors import InputError

MAX_MESSAGE = 500  # characters of a line; our longest message has about 300 without the input that it quotes
_LOG = logging.getLogger("fastdiff")  # the library's


def prepare() -> None:
    """Open closed streams, and make any text printable.

    A closed stream becomes the null device. Otherwise the next opened file would get its descriptor, and everything
    that a library prints would end up in that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has other streams
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a label's characters


def require_stdout() -> None:
    """Raise InputError if stdout is closed, before work whose result nobody could read."""
    if getattr(sys.stdout, "name", None) == os.devnull:
        raise InputError("stdout is closed, so the output would be lost; leave out >&-, or redirect it with > FILE")


def drop_unwritten(stream: TextIO) -> None:
    """Drop a stream's buffer if it cannot be written: Python would try again at exit, and exit with another code."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(message: str) -> None:
    """Print a line on stderr. Ignore errors, as stderr may be full or have no reader."""
    with contextlib.suppress(OSError):
        print(f"fastdiff: {message}", file=sys.stderr)
    drop_unwritten(sys.stderr)


def printable(text: str) -> str:
    """Return `text` as one line without control characters, so no file name or content can control the terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def error_line(text: str) -> str:
    """Return `text` as one line of at most MAX_MESSAGE characters.

    Long words, which are quoted inputs, are shortened first: the problem usually precedes them, and the remedy follows.
    """
    line = printable(text)
    if len(line) > MAX_MESSAGE:
        line = re.sub(r"\S{121,}", lambda word: f"{word[0][:60]}...{word[0][-20:]}", line)
    if len(line) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2 - 3
        line = f"{line[:half]} ... {line[-half:]}"
    return line


class Notices(logging.Handler):
    """Print each notice once, above a progress bar. Inside its block, the library's log lines are notices too.

    quiet: print nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(logging.WARNING)
        self.quiet = quiet
        self._said: set[str] = set()

    def __enter__(self) -> "Notices":
        _LOG.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _LOG.removeHandler(self)

    def say(self, *lines: str) -> None:
        """Print the lines that were not printed before on stderr."""
        from tqdm import tqdm

        for line in lines:
            if not self.quiet and line not in self._said:
                self._said.add(line)
                with tqdm.external_write_mode(file=sys.stderr):
                    say(error_line(line))

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

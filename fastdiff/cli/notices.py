"""Notices beside a run: what the command finds, and what the library logs while it draws."""

import logging
import sys

from fastdiff.cli.streams import error_line, say

_LOG = logging.getLogger("fastdiff")


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

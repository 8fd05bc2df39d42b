"""Ctrl-C while `fastdiff` runs: one line and exit code 130, at once.

No KeyboardInterrupt is raised: imports under way, finalizers and `finally` blocks lose it, trip over it or print it,
and threads at work would be waited for.
"""

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

EXIT_CODE = 130


class CtrlC:
    """The answer to Ctrl-C once it is installed; until then it is Python's."""

    def __init__(self) -> None:
        self.describe: Callable[[], str] = lambda: "fastdiff: interrupted"  # the line that is printed
        self.pressed = False
        self._presses: queue.SimpleQueue = queue.SimpleQueue()  # the one queue that a signal's handler may put into
        self._deferred = False

    def install(self) -> None:
        """Take the place of Python's own handler; where Ctrl-C is ignored, as in the background, it stays so."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.answer)

    def answer(self, *_: object) -> None:
        """Handle a signal: end the process, or let the block of `deferred` end first if this is the first one."""
        if self.pressed or not self._deferred:
            self.end()
        self.pressed = True
        self._presses.put(None)

    def end(self) -> NoReturn:
        """End the process as it is; what Python's own end would wait for is left to the system."""
        try:
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"{self.describe()}\n".encode(errors="backslashreplace"))
        finally:
            os._exit(EXIT_CODE)

    def wait(self) -> None:
        """Wait for Ctrl-C within a block of `deferred`."""
        self._presses.get()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block end before Ctrl-C ends the process; a second one does not wait."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            if self.pressed:
                self.end()


CTRL_C = CtrlC()

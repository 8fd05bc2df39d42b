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
        self._under_way = 0  # blocks of `deferred`, of all threads
        self._lock = threading.RLock()  # of this number, and of the end: a handler may come within either

    def install(self) -> None:
        """Take the place of Python's own handler; where Ctrl-C is ignored, as in the background, it stays so."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.answer)

    def answer(self, *_: object) -> None:
        """Handle a signal: end the process, or let the blocks of `deferred` end first if this is the first one."""
        is_first, self.pressed = not self.pressed, True  # before it is asked what is under way: see `deferred`
        if not is_first or not self._under_way:
            self.end()
        self._presses.put(None)

    def end(self) -> NoReturn:
        """End the process as it is; what Python's own end would wait for is left to the system."""
        with self._lock:  # of two threads one alone
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
        """Let the block, of any thread, end before Ctrl-C ends the process; a second one does not wait."""
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
            if self.pressed and not self._under_way:
                self.end()


CTRL_C = CtrlC()

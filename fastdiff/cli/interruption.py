"""Ctrl-C while `fastdiff` runs: print one line and exit at once with code 130.

No KeyboardInterrupt is raised. Running imports, finalizers and `finally` blocks swallow it, fail on it or print it, and
Python would wait for running threads.
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
    """The Ctrl-C handler. Python's own is in place until `install`."""

    def __init__(self) -> None:
        self.describe: Callable[[], str] = lambda: "fastdiff: interrupted"  # the line that is printed
        self.pressed = False
        self._ending = False
        self._presses: queue.SimpleQueue = queue.SimpleQueue()  # the only queue that is safe in a signal handler
        self._under_way = 0  # active `deferred` blocks of all threads
        self._lock = threading.RLock()  # guards this count and `end`; reentrant, as the handler may interrupt either

    def install(self) -> None:
        """Replace Python's own handler. Where Ctrl-C is ignored, as in the background, it stays ignored."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.answer)

    def answer(self, *_: object) -> None:
        """Handle a signal: end the process. The first signal waits for active `deferred` blocks."""
        if self._ending:  # this signal interrupted `end`
            return
        is_first, self.pressed = not self.pressed, True  # set before the count is read: see `deferred`
        if not is_first or not self._under_way:
            self.end()
        self._presses.put(None)

    def end(self) -> NoReturn:
        """End the process at once, without the waits of Python's own shutdown."""
        with self._lock:  # only one of two threads
            self._ending = True
            try:
                # Not print: the signal may have interrupted one.
                os.write(2, f"{self.describe()}\n".encode(errors="backslashreplace"))
            finally:
                os._exit(EXIT_CODE)

    def wait(self) -> None:
        """Wait for Ctrl-C inside a `deferred` block."""
        self._presses.get()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block, in any thread, finish before Ctrl-C ends the process. A second Ctrl-C does not wait."""
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

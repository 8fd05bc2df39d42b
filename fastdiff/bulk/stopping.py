"""Stop: Ctrl-C and SIGTERM end a worker after the batch in hand, and within 20 seconds; torchrun kills after 30."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

PATIENCE = 10.0  # seconds in which the batch in hand may end; after that it ends with the step in hand
LAST = 18.0  # seconds after which the process ends wherever it is
_LOOK = 2.0  # seconds between looks at the parent


class Stop:
    """Whether this process was told to stop, and how it then ends."""

    def __init__(self) -> None:
        self.cleanup: Callable[[], None] = lambda: None  # called before the process ends wherever it is
        self.signal: signal.Signals | None = None
        self._asked = threading.Event()
        self._since = 0.0

    def install(self) -> None:
        """Answer the process's signals, and stop when the parent is gone: a worker without its launcher has no user."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._answer(signal.Signals(number)))
        threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()

    def ask(self, number: signal.Signals) -> None:
        """Tell it to stop."""
        if not self._asked.is_set():
            self.signal, self._since = number, time.monotonic()
            self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def is_late(self) -> bool:
        """Whether the batch in hand took too long."""
        return self.asked and time.monotonic() - self._since > PATIENCE

    @property
    def exit_code(self) -> int:
        """As a shell has it for a process that a signal ended."""
        return 128 + (self.signal or signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Wait, unless it is told to stop. Whether it is."""
        return self._asked.wait(seconds)

    def _watch(self, parent: int) -> None:
        while not self._asked.wait(_LOOK):
            if os.getppid() != parent:
                self._answer(signal.SIGTERM)

    def _answer(self, number: signal.Signals) -> None:
        """Tell it to stop, and see to it that the process then ends."""
        if not self.asked:
            self.ask(number)
            timer = threading.Timer(LAST, self._end)
            timer.daemon = True
            timer.start()

    def _end(self) -> NoReturn:
        try:
            self.cleanup()
        finally:
            os._exit(self.exit_code)

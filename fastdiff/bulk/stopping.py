"""Stop a worker after its batch on Ctrl-C, SIGTERM or SIGHUP, within 20 s: torchrun kills it after 30."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

PATIENCE = 10.0  # seconds for the current batch to finish; after that, the worker stops at the next step
LAST = 18.0  # seconds after which the process exits at once
_LOOK = 2.0  # seconds between checks of the parent


def end_signals() -> list[signal.Signals]:
    """Return the signals that stop a run, without SIGHUP under nohup."""
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    ends = hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if ends else [])]


class Stop:
    """Whether this process was told to stop, and how it ends."""

    def __init__(self) -> None:
        self.cleanup: Callable[[], None] = lambda: None  # called before the process exits at once
        self.signal: signal.Signals | None = None
        self._asked = threading.Event()
        self._since = 0.0

    def install(self) -> None:
        """Handle the stop signals, and stop when the parent is gone: without a launcher, nobody needs the worker."""
        for number in end_signals():
            signal.signal(number, lambda number, _: self._answer(signal.Signals(number)))
        threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()

    def ask(self, number: signal.Signals) -> None:
        """Tell the process to stop."""
        if not self._asked.is_set():
            self.signal, self._since = number, time.monotonic()
            self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def is_late(self) -> bool:
        """Whether the current batch has taken longer than PATIENCE since the stop."""
        return self.asked and time.monotonic() - self._since > PATIENCE

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a process ended by the signal."""
        return 128 + (self.signal or signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` or until told to stop. Return whether told to stop."""
        return self._asked.wait(seconds)

    def _watch(self, parent: int) -> None:
        while not self._asked.wait(_LOOK):
            if os.getppid() != parent:
                self._answer(signal.SIGTERM)

    def _answer(self, number: signal.Signals) -> None:
        """Tell the process to stop, and end it after LAST seconds."""
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

"""Studio: everything that the endpoints share, from the drawer to the metrics."""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError

from fastdiff.serve.admission import Admission
from fastdiff.serve.keys import Keys
from fastdiff.serve.metrics import Metrics
from fastdiff.serve.orders.jobs import Drawer
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.orders.translation import Offered
from fastdiff.serve.wire.errors import explain


class Studio:
    """The models on offer and the drawer, for the endpoints of one server."""

    def __init__(self, offers: Offered, limits: Limits, keys: Keys, drawer: Drawer) -> None:
        self.offers, self.limits, self.keys, self.drawer = offers, limits, keys, drawer
        self.admission, self.metrics = Admission(limits), Metrics(drawer)
        self.loaded: Future[list[str]] = Future()  # gets notices when the models are in memory and warm
        self.lost = drawer.lost  # has the error that ends the server

    def load(self, sizes: Sequence[tuple[int, int]] = ()) -> None:
        """Begin to load the models, and to draw a few steps of each of the `sizes` (width, height)."""

        def load() -> None:
            try:
                notices = self.drawer.load(sizes)
            except BaseException as error:
                self._end_loading(error)
            else:
                self._end_loading(notices)

        threading.Thread(target=load, name="load", daemon=True).start()

    async def until_loaded(self) -> None:
        """Wait for the models. Raises the error of loading."""
        if self.loaded.done():
            self.loaded.result()
        else:
            await asyncio.shield(asyncio.wrap_future(self.loaded))

    @property
    def is_ready(self) -> bool:
        """Whether a request is drawn at once, or as soon as its turn comes."""
        return self.loaded.done() and self.loaded.exception() is None and not self.admission.closed

    def close(self, seconds: float) -> bool:
        """End all requests before their next step, and wait for the current one. Return whether it ended in time."""
        self._end_loading(explain(CancelledError()))  # of requests that wait for the models
        return self.drawer.close(seconds)

    def _end_loading(self, result: BaseException | list[str]) -> None:
        with contextlib.suppress(InvalidStateError):  # it ended before
            if isinstance(result, BaseException):
                self.loaded.set_exception(result)
            else:
                self.loaded.set_result(result)

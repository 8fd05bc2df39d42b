"""Studio: everything that the endpoints share, from the models to the metrics."""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError

from fastdiff.engine import Engine
from fastdiff.errors import DeviceLostError
from fastdiff.serve.admission import Admission
from fastdiff.serve.drawing import Drawer
from fastdiff.serve.keys import Keys
from fastdiff.serve.metrics import Metrics
from fastdiff.serve.offers import Offers
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.wire.errors import explain

ENGINE_CLOSED = "engine: it is closed"  # the beginning of its error


class Studio:
    """The models on offer and the engine that draws with them, for the endpoints of one server."""

    def __init__(self, offers: Offers, limits: Limits, keys: Keys) -> None:
        self.offers, self.limits, self.keys = offers, limits, keys
        self.engine = Engine(max_batch=limits.batch, max_requests=limits.requests)
        self.admission, self.metrics = Admission(limits), Metrics(self.engine)
        self.drawer = Drawer(offers, self.engine, self.metrics, limits.minutes)
        self.loaded: Future[None] = Future()  # done when the models are in memory and warm
        self.lost: Future[BaseException] = Future()  # has the error that ends the server

    def load(self, sizes: Sequence[tuple[int, int]] = ()) -> None:
        """Begin to load the models, and to draw a few steps of each of the `sizes` (width, height)."""

        def load() -> None:
            try:
                self.offers.load()
                self.drawer.warm_up(sizes)
            except BaseException as error:
                self._end_loading(error)
            else:
                self._end_loading(None)

        threading.Thread(target=load, name="load", daemon=True).start()

    async def until_loaded(self) -> None:
        """Wait for the models. Raises the error of loading."""
        if self.loaded.done():
            return self.loaded.result()
        await asyncio.shield(asyncio.wrap_future(self.loaded))

    @property
    def is_ready(self) -> bool:
        """Whether a request is drawn at once, or as soon as its turn comes."""
        return self.loaded.done() and self.loaded.exception() is None and not self.admission.closed

    def notice(self, error: BaseException) -> None:
        """Look at the error of a request: the server cannot go on without its device or its engine."""
        is_closed = str(error).startswith(ENGINE_CLOSED) and not self.admission.closed
        if (isinstance(error, DeviceLostError) or is_closed) and not self.lost.done():
            self.lost.set_result(error)

    def close(self, seconds: float) -> bool:
        """End all requests before their next step, and wait for the current one. Return whether it ended in time."""
        self._end_loading(explain(CancelledError()))  # of requests that wait for the models
        closing = threading.Thread(target=self.engine.close, kwargs={"cancel": True}, daemon=True)
        closing.start()
        closing.join(seconds)
        self.drawer.close()
        return not closing.is_alive()

    def _end_loading(self, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):  # it ended before
            if error is None:
                self.loaded.set_result(None)
            else:
                self.loaded.set_exception(error)

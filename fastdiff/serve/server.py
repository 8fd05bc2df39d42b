"""Serve the application on a port, in a thread, until it is told to stop."""

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastdiff.errors import InputError
from fastdiff.serve.app import build_app
from fastdiff.serve.studio import Studio

MAX_HEADERS = 2**15  # bytes
KEEP_ALIVE = 75  # seconds between two requests of a connection: longer than a proxy's, which then never races
BACKLOG = 256  # connections that wait to be accepted
TICK = 0.05  # seconds between two looks at the requests that are left
CLOSING_SECONDS = 2.0  # for the current step, and for answers on their way


class Server:
    """A running server."""

    def __init__(self, studio: Studio, listener: socket.socket) -> None:
        self.studio = studio
        host, port = listener.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        config = uvicorn.Config(
            build_app(studio),
            http=_protocol(studio.limits.header_seconds),
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(CLOSING_SECONDS),
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
        self._uvicorn = uvicorn.Server(config)
        self._listener = listener
        self._thread = threading.Thread(target=self._uvicorn.run, args=([listener],), name="http", daemon=True)
        self._thread.start()

    def drain(self, seconds: float, give_up: Callable[[], bool] = lambda: False) -> int:
        """Take no new requests, and wait for the others up to `seconds`. Return how many are left."""
        admission, until = self.studio.admission, time.monotonic() + seconds
        admission.closed = True
        while admission.here and time.monotonic() < until and not give_up():
            time.sleep(TICK)
        return admission.here

    def close(self) -> bool:
        """End all requests before their next step. Return whether the current step ended in time.

        A longer step continues in its thread, and the process must then end with os._exit: torch's threads do not
        survive the normal exit of Python while they compute.
        """
        self.studio.admission.closed = True
        in_time = self.studio.close(CLOSING_SECONDS)
        self._uvicorn.should_exit = True
        self._thread.join(2 * CLOSING_SECONDS)
        self._listener.close()
        return in_time


@contextlib.contextmanager
def serving(studio: Studio, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
    """Serve while the block runs. port: 0 takes a free one.

    Raises InputError for a host that is not an address of this machine, and OSError for a port in use.
    """
    server = Server(studio, listen(host, port))
    try:
        yield server
    finally:
        server.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises as `serving`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise OSError(f"port {port} at {host} is not free; choose another --port") from None
        raise InputError(f"--host {host} is not an address of this machine; omit it, or use 0.0.0.0") from None


def _protocol(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol, with a time limit for the headers of a connection's first request.

    It sends each part of an answer at once.
    """

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # asyncio does it only for sockets that name TCP. Without it, the body of an answer waits until the client
            # has acknowledged the headers, some 40 ms.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._impatience = asyncio.get_running_loop().call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._impatience.cancel()
            super().connection_lost(exc)

    return Protocol

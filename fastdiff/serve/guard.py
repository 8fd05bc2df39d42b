"""A guard in front of the application: keys, host names, and bodies that are too large or too slow."""

import ipaddress
import time
from contextlib import suppress

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.studio import Studio
from fastdiff.serve.wire.errors import ApiError, ClientGoneError, answer_of, explain

OPEN = ("/health", "/ready", "/openapi.json")  # paths that need no key


class Guard:
    """ASGI middleware around the whole application. No exception passes it."""

    def __init__(self, app: ASGIApp, studio: Studio) -> None:
        self.app, self.studio = app, studio

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            try:
                with anyio.fail_after(self.studio.limits.send_seconds):
                    await send(message)
            except TimeoutError:  # the client does not read
                raise ClientGoneError from None

        try:
            self._check(scope)
            await self.app(scope, _Body(receive, self.studio.limits).receive, sending)
        except ClientGoneError:
            pass
        except Exception as error:
            found = explain(error)
            self.studio.metrics.failed(found)
            if not begun:
                await answer_of(found)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Set the client's key in the state of the request. Raises ApiError."""
        headers, keys, state = Headers(scope=scope), self.studio.keys, scope.setdefault("state", {})
        state["key"] = None
        if scope["path"] not in OPEN:
            state["key"] = keys.check(headers.get("authorization"))
        if not keys and not _is_of_loopback(headers.get("host", "")):
            # A page of another site may have a name that leads to this machine (DNS rebinding).
            raise ApiError(403, "this host name is not allowed without keys; use localhost, or give the server --keys")
        if not keys and not _is_of_loopback(headers.get("origin", "").rpartition("://")[2]):
            raise ApiError(403, "pages of other sites are not let in; give the server --keys")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.studio.limits.body:
            raise _too_large(self.studio.limits.body)


class _Body:
    """The body of a request, within the limits."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits = receive, limits
        self._until, self._bytes, self._done = time.monotonic() + limits.body_seconds, 0, False

    async def receive(self) -> Message:
        """Return the next message. Raises ApiError for a body that is too large or takes too long."""
        if self._done:
            return await self._receive()
        try:
            with anyio.fail_after(max(0.0, self._until - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            problem = f"the body took more than {self._limits.body_seconds:g} s; send it faster"
            raise ApiError(408, problem, code="body_timeout", headers={"Connection": "close"}) from None
        self._done = message["type"] != "http.request" or not message.get("more_body", False)
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._limits.body:
            raise _too_large(self._limits.body)
        return message


def _too_large(most: int) -> ApiError:
    message = f"the body is too large; the limit is {most:,} bytes"
    return ApiError(413, message, code="too_large", headers={"Connection": "close"})


def _is_of_loopback(host: str) -> bool:
    """Return whether a Host header names this machine: localhost, or an IP address, which nobody can rebind."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()
    if name in ("localhost", ""):
        return True
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False

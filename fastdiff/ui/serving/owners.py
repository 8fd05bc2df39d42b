"""Who owns a picture: the user who has logged in, or else the browser, identified by a cookie."""

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import gradio as gr
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdiff.ui.serving.store import Shelf, Store

_FILE = re.compile(r"/file[=/](.*)")
_FIRST = ("/", "/config")  # the first requests of a session
_COOKIE = "fastdiff-browser"
_SECONDS = 400 * 86400  # the longest that browsers keep a cookie


def shelf_of(store: Store, request: gr.Request) -> Shelf:
    """Return the shelf of the sender of an event. A client without cookies has one per session."""
    return store.shelf(request.username, request.cookies.get(_COOKIE) or request.session_hash or "")


class Owners:
    """ASGI middleware that gives each browser its cookie, and serves pictures only to their owner."""

    def __init__(self, app: ASGIApp, store: Store, page: gr.Blocks) -> None:
        self.app, self.store, self.page = app, store, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        cookies = HTTPConnection(scope).cookies
        if (file := _FILE.search(scope["path"])) and self._is_anothers(file[1], cookies):
            return await PlainTextResponse("this picture is not yours", 403)(scope, receive, send)
        if not self.store.is_shared or scope["path"] not in _FIRST or _COOKIE in cookies:
            return await self.app(scope, receive, send)

        async def send_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = f"{_COOKIE}={secrets.token_urlsafe(32)}; Max-Age={_SECONDS}; Path=/; HttpOnly; SameSite=Lax"
                MutableHeaders(scope=message).append("set-cookie", cookie)
            await send(message)

        await self.app(scope, receive, send_cookie)

    def _is_anothers(self, name: str, cookies: Mapping[str, str]) -> bool:
        """Return whether a file is in the store but not on the client's shelf."""
        try:
            path = Path(name).resolve()
        except (OSError, ValueError, RuntimeError):
            return False  # Gradio refuses it
        if not path.is_relative_to(self.store.root):
            return False
        return not self.store.shelf(self._user(cookies), cookies.get(_COOKIE, "")).holds(path)

    def _user(self, cookies: Mapping[str, str]) -> str | None:
        """Return the user who has logged in, as Gradio's own `get_current_user` does."""
        app = self.page.app
        names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
        return next((app.tokens[cookies[name]] for name in names if cookies.get(name) in app.tokens), None)

"""A guard in front of Gradio that refuses cross-site requests, and bodies that would fill the disk."""

import re
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdiff.ui.inputs.uploaded import size_of_uploads
from fastdiff.ui.serving.access import HostNames

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Guard:
    """ASGI middleware around the whole server."""

    def __init__(self, app: ASGIApp, names: HostNames, uploads: Path, most_body: int, most_uploads: int) -> None:
        """uploads: their folder. most_body: maximum bytes of a request. most_uploads: maximum bytes of all uploads."""
        self.app, self.names, self.uploads = app, names, uploads
        self.most_body, self.most_uploads = most_body, most_uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        app = self.app if refusal is None else PlainTextResponse(refusal[1], status_code=refusal[0])
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal, or None."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self.names.have(host):
            name = host.partition(":")[0][:80].encode("ascii", "replace").decode()
            return 403, f"host name {name} is not allowed; to allow it, restart the server with --allow-host"
        if re.search(r"/file[=/]\w+:", scope["path"]):
            return 403, "this server does not fetch links"  # Gradio would
        return None if scope["method"] in _SAFE_METHODS else self._refusal_of_change(scope, headers, host)

    def _refusal_of_change(self, scope: Scope, headers: Headers, host: str) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal, for a request that changes something."""
        origin = headers.get("origin")
        site = (origin or "").partition("://")[2]
        # A browser always names the origin; the API's clients name none.
        if origin is not None and site != host and not self.names.are_public(site):
            return 403, "cross-site requests are refused"
        length = headers.get("content-length", "")
        if not length.isdecimal():
            return 411, "the request needs a Content-Length header"
        if int(length) > self.most_body:
            return 413, f"the request is too large; the limit is {self.most_body} bytes"
        if scope["path"].endswith("/upload") and int(length) + size_of_uploads(self.uploads) > self.most_uploads:
            return 413, "the server's space for uploads is full; try again later"
        return None

"""Cancel jobs that nobody listens to. Otherwise an abandoned job would block the shared queue."""

import asyncio
import re
import time
from collections import Counter
from urllib.parse import parse_qs

from gradio.queueing import Event, Queue
from starlette.types import ASGIApp, Receive, Scope, Send

PATIENCE = 30.0  # seconds
_JOINS = re.compile(r"/queue/join/?$|/call/")
_RESULT = re.compile(r"/call/(?:v2/)?[^/]+/([^/]+)/?$")


class Listeners:
    """ASGI middleware that tracks open event streams. Gradio itself only cancels the jobs of closed streams."""

    def __init__(self, app: ASGIApp, queue: Queue) -> None:
        self.app, self.queue = app, queue
        self._open: Counter[str] = Counter()  # open streams per session
        self._tasks: set[asyncio.Task] = set()  # the event loop has only weak references

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = self._listened(scope) if scope["type"] == "http" and scope["method"] == "GET" else None
        self._open[visit or ""] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._open[visit or ""] -= 1
        if scope["type"] == "http" and scope["method"] == "POST" and _JOINS.search(scope["path"]):
            asyncio.get_running_loop().call_later(PATIENCE, self._end_unheard)

    def _listened(self, scope: Scope) -> str | None:
        """Return the session whose events a request asks for."""
        if result := _RESULT.search(scope["path"]):
            event = self.queue.event_ids_to_events.get(result[1])
            return result[1] if event is None else event.session_hash
        if scope["path"].endswith("/queue/data"):
            return parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [None])[0]
        return None

    def _end_unheard(self) -> None:
        waiting = [event for queue in self.queue.event_queue_per_concurrency_id.values() for event in queue.queue]
        running = [event for job in self.queue.active_jobs if job for event in job]
        for visit in {event.session_hash for event in (*waiting, *running) if self._is_unheard(event)}:
            task = asyncio.create_task(self.queue.clean_events(session_hash=visit))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _is_unheard(self, event: Event) -> bool:
        return not self._open[event.session_hash] and time.monotonic() - event.enqueue_time >= PATIENCE

"""The page on a port: its folder, its guard, and Gradio's own settings."""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
from gradio.tunneling import CURRENT_TUNNELS
from starlette.middleware import Middleware

from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.page import CSS, THEME, build_page
from fastdiff.ui.security import Guard

CLOSING_SECONDS = 1  # for the server, which waits for nobody
STEP_SECONDS = 1.5  # for the step in hand: if it ends a picture, that is kept


@contextmanager
def serving(
    models: Models, limits: Limits, *, host: str = "127.0.0.1", port: int | None = None, share: bool = False
) -> Iterator[str]:
    """Serve the page while the block runs; gives its address. Without a `port`, Gradio takes the first free from 7860.

    Uploads and pictures lie in a folder that nobody else can read and that goes with the server, in 3 seconds whatever
    is open or under way. A longer step goes on in its thread, and the process then needs os._exit: torch's threads do
    not survive Python's own end in their midst. OSError for a port in use.
    """
    with tempfile.TemporaryDirectory(prefix="fastdiff-ui-", ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        page = build_page(models, limits)
        try:
            yield _launch(page, limits, Path(folder), host, port, share)
        finally:
            _close(page)
            del os.environ["GRADIO_TEMP_DIR"]


def _launch(page: gr.Blocks, limits: Limits, folder: Path, host: str, port: int | None, share: bool) -> str:
    try:
        _, address, shared_address = page.launch(
            server_name=host,
            server_port=port,
            share=share,
            prevent_thread_lock=True,
            quiet=True,
            show_error=False,
            max_file_size=limits.upload,
            enable_monitoring=False,
            ssr_mode=False,
            run_history=False,  # the page has its own, which ends with the visit
            footer_links=["api", "settings"],
            theme=THEME,
            css=CSS,
            app_kwargs={"middleware": [Middleware(Guard, limits=limits, uploads=folder)]},
        )
    except OSError:
        raise OSError(f"port {port or 'from 7860'} at {host} cannot be had; give another --port or --host") from None
    return shared_address or address


def _close(page: gr.Blocks) -> None:
    """End the server. Its own `close` waits for open pages and streams."""
    if not page.is_running:
        return
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would print what is cut off
    page._queue.close()
    page.is_running = False
    page.server.force_exit = page.server.should_exit = True
    page.server.thread.join(CLOSING_SECONDS)
    for tunnel in CURRENT_TUNNELS:
        tunnel.kill()
    deadline = time.monotonic() + STEP_SECONDS
    for thread in threading.enumerate():
        if thread.name == "AnyIO worker thread":  # of the server's event loop, which has ended: no step follows
            thread.join(max(0, deadline - time.monotonic()))

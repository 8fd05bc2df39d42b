"""The page on a port: its folder, its guard, and Gradio's own settings."""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware

from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.page import CSS, JS, THEME, build_page
from fastdiff.ui.security import Guard

STEP_SECONDS = 30  # no step should take longer


@contextmanager
def serving(
    models: Models, limits: Limits, *, host: str = "127.0.0.1", port: int | None = None, share: bool = False
) -> Iterator[str]:
    """Serve the page while the block runs; gives its address. Without a `port`, Gradio takes the first free from 7860.

    Uploads and pictures lie in a folder that nobody else can read and that goes with the server. OSError for a port in
    use.
    """
    with tempfile.TemporaryDirectory(prefix="fastdiff-ui-", ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        page = build_page(models, limits)
        try:
            yield _launch(page, limits, Path(folder), host, port, share)
        finally:
            page.close(verbose=False)
            _join_workers()
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
            js=JS,
            app_kwargs={"middleware": [Middleware(Guard, limits=limits, uploads=folder)]},
        )
    except OSError:
        raise OSError(f"port {port or 'from 7860'} at {host} cannot be had; give another --port or --host") from None
    return shared_address or address


def _join_workers() -> None:
    """Wait for steps that are under way: torch's threads do not survive an exit in their midst."""
    for thread in threading.enumerate():
        if thread.name == "AnyIO worker thread":  # of Gradio's event loop, which has ended
            thread.join(timeout=STEP_SECONDS)

"""Serve the page on a port: its folders, its middleware and Gradio's settings."""

import errno
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
from gradio.tunneling import CURRENT_TUNNELS
from starlette.middleware import Middleware

from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.runs.files import check
from fastdiff.ui.page import build_page
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.serving.access import HostNames, Users, is_reached_by_others
from fastdiff.ui.serving.failures import Failures
from fastdiff.ui.serving.listeners import Listeners
from fastdiff.ui.serving.look import CSS, JS, THEME
from fastdiff.ui.serving.owners import Owners
from fastdiff.ui.serving.security import Guard
from fastdiff.ui.serving.store import Store, remove_empty
from fastdiff.ui.serving.temporary import temporary_folder
from fastdiff.ui.shared import Shared

FIRST_PORTS = range(7860, 7960)
CLOSING_SECONDS = 1  # given to the server to close
STEP_SECONDS = 1  # given to the current step: a picture that it finishes is kept


@contextmanager
def serving(
    shared: Shared,
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    allow_hosts: Sequence[str] = (),
    users: Users | None = None,
    outputs: Path = Path("outputs"),
) -> Iterator[list[str]]:
    """Serve the page while the block runs. Yields its address, and the share link if `share` is set.

    host: the address to listen on. port: None takes the first free port from 7860. allow_hosts: names of proxies in
    front of the server. users: who may log in; None lets everybody in. outputs: the folder that keeps the pictures.

    Uploads are stored in a private folder, which is deleted when the server stops. Stopping takes at most 3 seconds,
    even with open connections or a running step. A longer step continues in its thread, and the process must then
    exit with os._exit: torch's threads do not survive the normal exit of Python while they compute.

    Raises InputError for a host that is not an address of this machine, and OSError for a port in use or if Gradio
    creates no share link.
    """
    port = _free_port(host, port)
    check([outputs / "picture.png"], flag="--outputs")
    is_shared = share or bool(users or allow_hosts) or is_reached_by_others(host)
    store = Store(outputs, limits.kept if is_shared else None, limits.visitors)
    remove_abandoned(store)
    names = HostNames(host, allow_hosts)
    with temporary_folder() as folder:
        os.environ["GRADIO_TEMP_DIR"] = str(folder)
        page = build_page(shared, limits, store)
        middleware = [
            Middleware(Guard, names=names, uploads=folder, most_body=limits.upload, most_uploads=limits.uploads),
            Middleware(Owners, store=store, page=page),
            Middleware(Listeners, queue=page._queue),
            Middleware(Failures, queue=page._queue, uploads=folder),
        ]
        gr.set_static_paths([store.root])  # Gradio serves these files in place; Owners decides who may read them
        try:
            launched = _launch(page, limits, host, port, share, auth=users, app_kwargs={"middleware": middleware})
            names.public |= {urlsplit(address).hostname or "" for address in launched[1:]}
            yield launched
        finally:
            shared.queue.close(STEP_SECONDS)
            _close(page)
            del os.environ["GRADIO_TEMP_DIR"]


def remove_abandoned(store: Store) -> None:
    """Remove the temporary files of runs that were killed, and their folders if nothing else is in them."""
    for run in store.runs():
        temporaries.remove_abandoned(run)
        remove_empty(run)


def _free_port(host: str, port: int | None) -> int:
    """Return `port` if it is free, any free port for 0, the first from 7860 for None. Others may still take it."""
    for wanted in FIRST_PORTS if port is None else [port]:
        try:
            with socket.create_server(
                (host, wanted), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            ) as free:
                return free.getsockname()[1]
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise InputError(
                    f"--host {host} is not an address of this machine; omit --host, or use 0.0.0.0"
                ) from None
    raise _port_in_use(host, port)


def _port_in_use(host: str, port: int | None) -> OSError:
    return OSError(f"no free port at {host} (tried {port or 'from 7860'}); choose another --port or --host")


def _launch(page: gr.Blocks, limits: Limits, host: str, port: int, share: bool, **options: Any) -> list[str]:
    """Launch the page and return its address, and the share link if there is one."""
    try:
        with redirect_stdout(sys.stderr):  # Gradio prints share links
            _, address, link = page.launch(
                server_name=f"[{host}]" if ":" in host else host,
                server_port=port,
                share=share,
                prevent_thread_lock=True,
                quiet=True,
                show_error=False,
                max_file_size=limits.upload,
                enable_monitoring=False,
                ssr_mode=False,
                run_history=False,  # the page has its own History
                footer_links=["api", "settings"],
                theme=THEME,
                css=CSS,
                js=JS,
                **options,
            )
    except OSError:
        raise _port_in_use(host, port) from None
    if share and not link:
        raise OSError("--share: Gradio created no share link, for the reason printed above; fix it, or omit --share")
    return [address, link] if link else [address]


def _close(page: gr.Blocks) -> None:
    """Stop the server. Gradio's own `close` waits for open pages and streams."""
    if not page.is_running:
        return
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would log each connection that is cut
    page._queue.close()
    page.is_running = False
    page.server.force_exit = page.server.should_exit = True
    page.server.thread.join(CLOSING_SECONDS)
    for tunnel in CURRENT_TUNNELS:
        tunnel.kill()

"""`fastdiff serve`: draw for HTTP clients until SIGTERM or Ctrl-C."""

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeAlias

from fastdiff.cli.arguments import DEVICES, count, device, sizes
from fastdiff.cli.interruption import CTRL_C
from fastdiff.cli.streams import say
from fastdiff.cli.ui import minutes, port
from fastdiff.errors import InputError
from fastdiff.requests import defaults
from fastdiff.requests.request import PRECISIONS
from fastdiff.ui.serving.access import is_reached_by_others

if TYPE_CHECKING:
    from fastdiff.serve.server import Server
    from fastdiff.serve.studio import Studio

HOST, PORT, DRAIN = "127.0.0.1", 8000, 30.0
WORKERS: "int | Literal['auto']" = 0  # 0: the server's own process draws
MAX_REQUESTS, QUEUE, STREAMS, SIDE, WORK, SECONDS = 64, 64, 16, 2048, 1000, 600.0
Stop: TypeAlias = "SimpleQueue[int | BaseException]"  # the number of a signal, or an error that ends the server


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Raises InputError for bad arguments, OSError for a port in use, and errors of loading."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(f"serve needs {error.name}, which is not installed; pip install 'fastdiff[serve]'") from None
    from fastdiff.serve.server import serving

    studio = _studio(args)
    stop: Stop = SimpleQueue()
    with _signals_to(stop), serving(studio, host=args.host, port=args.port) as server:
        ids = ", ".join(studio.offers.ids)
        print(f"fastdiff serves {ids} at {server.address}/v1 (Ctrl-C to stop)", flush=True)
        studio.lost.add_done_callback(lambda lost: stop.put(lost.result()))
        studio.loaded.add_done_callback(lambda loaded: _say_loaded(loaded, stop))
        studio.load(args.warm or ())
        reason = stop.get()
        if reason == signal.SIGTERM:
            _drain(server, args.drain, stop)
        ended = server.close()
    return _end(reason, ended)


@contextlib.contextmanager
def _signals_to(stop: Stop) -> Iterator[None]:
    """Put SIGTERM and SIGINT into a queue while the block runs."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, _: stop.put(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _studio(args: argparse.Namespace) -> "Studio":
    """Check the arguments, and return what the server draws with."""
    from fastdiff.serve.keys import VARIABLE, Keys

    keys = Keys.read(args.keys)
    if not keys and is_reached_by_others(args.host):
        raise InputError(
            f"--host {args.host} lets others draw on this machine; give --keys FILE with one key per line, or set "
            f"{VARIABLE}"
        )
    from fastdiff.serve.drawing.engine_drawer import EngineDrawer
    from fastdiff.serve.drawing.messages import Setup
    from fastdiff.serve.drawing.workers import Workers, choose_devices
    from fastdiff.serve.orders.limits import Limits
    from fastdiff.serve.studio import Studio

    limits = Limits(
        batch=args.max_batch,
        requests=args.max_requests,
        queue=args.max_queue,
        streams=args.max_streams,
        side=args.max_side,
        work=args.max_work,
        seconds=args.timeout,
        minutes=args.max_minutes,
    )
    setup = Setup(tuple(args.model or [defaults.MODEL]), args.precision, args.lora_dir, limits)
    offers = setup.offers(args.device)
    if not args.workers:
        return Studio(offers, limits, keys, EngineDrawer(offers, limits))
    devices = choose_devices(args.workers, args.device)
    of_all = replace(limits, requests=limits.requests * len(devices))
    return Studio(offers, of_all, keys, Workers(setup, devices))


def _say_loaded(loaded: "Future[list[str]]", stop: Stop) -> None:
    error = loaded.exception()
    if error is not None:
        stop.put(error)
        return
    for line in (*loaded.result(), "ready"):
        say(line)


def _drain(server: "Server", seconds: float, stop: Stop) -> None:
    say(f"takes no new requests; running ones have {seconds:g} s")
    left = server.drain(seconds, lambda: not stop.empty())
    if left:
        say(f"{left} requests did not end in time")


def _end(reason: int | BaseException, ended: bool) -> int:
    """Return the exit code, or raise the error that ended the server."""
    if isinstance(reason, BaseException):
        raise reason
    if reason == signal.SIGINT:
        CTRL_C.end()
    if not ended:  # torch's threads do not survive the normal exit of Python while they compute
        sys.stdout.flush()
        os._exit(0)
    return 0


def seconds(text: str) -> float:
    """Parse a number of seconds."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")


def workers(text: str) -> "int | Literal['auto']":
    """Parse the number of workers."""
    if text == "auto":
        return "auto"
    return 0 if text == "0" else count(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [options]"
    add = parser.add_argument_group("models").add_argument
    model = (
        f"bundled name, folder, file or hub id; may be repeated, the first is the default (default: {defaults.MODEL})"
    )
    add("-m", "--model", action="append", metavar="MODEL", help=model)
    add("--lora-dir", type=Path, metavar="DIR", help="offer the LoRAs inside DIR, by their names there")
    add("--precision", choices=PRECISIONS, default=defaults.PRECISION, metavar="NAME", help=", ".join(PRECISIONS))
    add("--device", type=device, default=defaults.DEVICE, help=f"{DEVICES} (default: {defaults.DEVICE})")
    processes = "processes that draw; auto: one for each GPU; 0: the server's own"
    add("--workers", type=workers, default=WORKERS, metavar="N", help=f"{processes} (default: {WORKERS})")
    warm = "draw these sizes before the server is ready, such as 512x512,1024x768 (default: the model's own)"
    add("--warm", type=sizes, metavar="SIZES", help=warm)
    add = parser.add_argument_group("network").add_argument
    add("--host", default=HOST, help=f"address to listen on; others than loopback need --keys (default: {HOST})")
    add("--port", type=port, default=PORT, help=f"port to listen on, 0 for any free port (default: {PORT})")
    add("--keys", type=Path, metavar="FILE", help="bearer keys, one per line (default: FASTDIFF_API_KEYS)")
    add(
        "--drain",
        type=seconds,
        default=DRAIN,
        metavar="SECONDS",
        help=f"after SIGTERM, for running requests ({DRAIN:g})",
    )
    _add_limits(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    options = {
        "--max-requests": (count, MAX_REQUESTS, "N", "requests that are drawn at a time, by each worker"),
        "--max-queue": (count, QUEUE, "N", "more requests that wait; others get 429"),
        "--max-streams": (count, STREAMS, "N", "open streams of a key"),
        "--max-side": (count, SIDE, "PIXELS", "the longest side of a picture"),
        "--max-work": (count, WORK, "N", "millions of pixels x steps of a request"),
        "--timeout": (seconds, SECONDS, "SECONDS", "for waiting and drawing"),
    }
    add("--max-batch", type=count, metavar="N", help="pictures that share a step (default: as memory allows, to 32)")
    for name, (kind, default, metavar, words) in options.items():
        add(name, type=kind, default=default, metavar=metavar, help=f"{words} (default: {default:g})")
    add(
        "--max-minutes",
        type=minutes,
        metavar="N",
        help="of drawing a request, by the measured speed (default: no limit)",
    )

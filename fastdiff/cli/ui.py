"""`fastdiff ui`: serve the page until Ctrl-C."""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from fastdiff.cli.arguments import DEVICES
from fastdiff.cli.interruption import CTRL_C
from fastdiff.cli.streams import printable
from fastdiff.errors import InputError
from fastdiff.requests import defaults


def run(args: argparse.Namespace) -> int:
    """Serve the page until KeyboardInterrupt. InputError for what cannot be served, OSError for a port in use."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise InputError("ui needs gradio, which is not installed; pip install 'fastdiff[ui]'") from None
    from fastdiff.ui.limits import Limits
    from fastdiff.ui.models import Models
    from fastdiff.ui.server import serving

    models = Models(args.models_dir, args.allow_hub, args.device)
    for name, problem in models.left_out().items():
        print(printable(f"fastdiff: model {name} is left out: {problem}"), file=sys.stderr)
    signal.signal(signal.SIGTERM, CTRL_C.answer)  # so that the server's folder goes with it
    warm_up = threading.Thread(target=models.warm_up, args=(defaults.MODEL,))  # the first click finds the model loaded
    warm_up.start()
    try:
        server = serving(models, Limits(), host=args.host, port=args.port, share=args.share)
        with CTRL_C.deferred(), server as address:
            print(f"fastdiff is at {address} (Ctrl-C ends it)", flush=True)
            CTRL_C.wait()
    finally:
        warm_up.join()  # torch's threads do not survive an exit in their midst
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models-dir", type=Path, metavar="DIR", help="offer the model folders below this one too")
    add("--allow-hub", action="store_true", help="offer models of the Hugging Face hub, which are downloaded")
    add("--device", default=defaults.DEVICE, help=f"{DEVICES} (default: {defaults.DEVICE})")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets others in (default: 127.0.0.1)")
    add("--port", type=int, help="(default: the first free one from 7860)")
    add("--share", action="store_true", help="a public address through Gradio's servers")

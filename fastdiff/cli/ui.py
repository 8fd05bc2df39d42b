"""`fastdiff ui`: serve the page until Ctrl-C."""

import argparse
import contextlib
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from fastdiff.checkpoints.single_files.listing import VARIABLE, models_folder
from fastdiff.cli.arguments import DEVICES
from fastdiff.cli.interruption import CTRL_C
from fastdiff.cli.streams import printable
from fastdiff.errors import InputError
from fastdiff.requests import defaults
from fastdiff.requests.styles import Styles
from fastdiff.ui.serving import access

MAX_PORT = 65535
MINUTES_OF_OTHERS = 10.0
MOST_LINES = 10  # about models that are not offered


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C. Raises InputError for bad arguments and OSError for a port in use."""
    host = args.host or ("0.0.0.0" if access.space_names() else "127.0.0.1")
    is_open = args.share or bool(args.allow_host) or access.is_reached_by_others(host)
    users = _users(args, host, is_open)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # gradio reads it when it is imported
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise InputError("ui needs gradio, which is not installed; pip install 'fastdiff[ui]'") from None
    from fastdiff.hosting.catalogue.offered import OptionFiles
    from fastdiff.hosting.models import Models
    from fastdiff.runs.notices import find_device_notices
    from fastdiff.ui.parts.request import Limits
    from fastdiff.ui.server import serving
    from fastdiff.ui.shared import Shared

    minutes = args.max_minutes or (MINUTES_OF_OTHERS if is_open else None)
    styles = None if args.styles is None else Styles.read(args.styles)
    models_dir = models_folder(args.models_dir)
    files = OptionFiles(args.lora_dir, args.embedding_dir)
    models = Models(models_dir, args.allow_hub, args.device, args.preview_vae, styles, files)
    shared = Shared(models, minutes)
    for line in _not_offered(models.catalogue.left_out(), models_dir):
        print(printable(f"fastdiff: {line}"), file=sys.stderr)
    for line in find_device_notices(models.device):
        print(f"fastdiff: {line}", file=sys.stderr)
    signal.signal(signal.SIGTERM, CTRL_C.answer)  # so that SIGTERM removes the server's folder too
    server = serving(
        shared,
        Limits(),
        host=host,
        port=args.port,
        share=args.share,
        allow_hosts=args.allow_host or (),
        users=users,
        outputs=args.outputs,
    )
    with CTRL_C.deferred(), server as served:
        print(f"fastdiff is at {', '.join(access.addresses(served, host))} (Ctrl-C to stop)", flush=True)
        if is_open:
            print(f"fastdiff: {_warning(users is not None)}", file=sys.stderr, flush=True)
        threading.Thread(target=shared.warm_up, args=(defaults.MODEL,)).start()  # loaded before the first click
        CTRL_C.wait()
    return 0


def _not_offered(problems: Mapping[str, str], models_dir: Path | None) -> list[str]:
    """Return lines that say why models are not offered. A folder may hold hundreds of LoRAs, so the lines are few."""
    lines = [f"model {name} is not offered: {problem}" for name, problem in problems.items()]
    if len(lines) > MOST_LINES:
        others = f"{len(lines) - MOST_LINES} more models are not offered; fastdiff models"
        lines[MOST_LINES:] = [others + (f" --models-dir {models_dir} lists them" if models_dir else " lists them")]
    return lines


def _users(args: argparse.Namespace, host: str, is_open: bool) -> access.Users | None:
    """Return who may log in, or None for everybody.

    A server that others can reach needs an explicit choice, except on a Hugging Face Space.
    """
    users = None if args.no_auth else access.Users.read(args.auth)
    if is_open and users is None and not args.no_auth and not access.space_names():
        flag = "--share" if args.share else "--allow-host" if args.allow_host else f"--host {host}"
        raise InputError(
            f"{flag} lets others draw on this machine; give --auth FILE with one user:password per line, "
            f"set {access.AUTH_VARIABLE}=user:password, or give --no-auth to let everybody in"
        )
    return users


def _warning(has_users: bool) -> str:
    who = "everybody with a password" if has_users else "everybody who can reach one of these addresses"
    return f"{who} can use this machine's time and disk; without an https proxy, the traffic is not encrypted"


def port(text: str) -> int:
    """Parse the value of --port."""
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port; give one from 1 to {MAX_PORT}, or 0 for a free one")
    return int(text)


def minutes(text: str) -> float:
    """Parse the value of --max-minutes."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a positive number of minutes")


def host_name(text: str) -> str:
    """Check the value of --allow-host."""
    if not re.fullmatch(r"[\w.-]+", text):
        raise argparse.ArgumentTypeError(f"{text} is not a host name such as draw.example.org; omit https:// and ports")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = f"also offer the model folders and single files inside DIR (default: ${VARIABLE})"
    add("--models-dir", type=Path, metavar="DIR", help=help)
    add("--lora-dir", type=Path, metavar="DIR", help="offer the LoRAs inside DIR that fit the chosen model")
    add(
        "--embedding-dir",
        type=Path,
        metavar="DIR",
        help="let prompts use the embeddings inside DIR",
    )
    add(
        "--outputs",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="folder for the pictures, with one subfolder per day (default: outputs)",
    )
    add("--styles", metavar="FILE", help="offer the styles of A1111's styles.csv beside the prompt")
    add("--allow-hub", action="store_true", help="also offer models on the Hugging Face hub, downloaded on use")
    add(
        "--preview-vae",
        metavar="FOLDER",
        help="folder of an AutoencoderTiny (TAESD), which decodes sharper previews of models with such latents",
    )
    add("--device", default=defaults.DEVICE, help=f"{DEVICES} (default: {defaults.DEVICE})")
    add("--host", help="address to listen on; 0.0.0.0 lets other machines in (default: 127.0.0.1)")
    add("--port", type=port, help="port to listen on, 0 for any free port (default: first free port from 7860)")
    add("--share", action="store_true", help="create a public address through Gradio's servers")
    add(
        "--max-minutes",
        type=minutes,
        metavar="N",
        help=f"refuse longer requests (default: {MINUTES_OF_OTHERS:.0f} if others can reach the server, else no limit)",
    )
    add(
        "--allow-host",
        type=host_name,
        action="append",
        metavar="NAME",
        help="host name of a proxy in front of the server; may be repeated",
    )
    login = parser.add_mutually_exclusive_group()
    login.add_argument(
        "--auth",
        type=Path,
        metavar="FILE",
        help=f"file of users, one user:password per line (default: those in {access.AUTH_VARIABLE})",
    )
    login.add_argument("--no-auth", action="store_true", help="let everybody in without a password")

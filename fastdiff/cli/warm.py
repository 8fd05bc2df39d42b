"""`fastdiff warm`: compile beforehand what drawing with a model launches, also without a GPU."""

import argparse
import json

from fastdiff.cli.arguments import add_file_arguments, add_scheduler_argument, batches, sizes
from fastdiff.cli.streams import printable, require_stdout, say
from fastdiff.errors import InputError
from fastdiff.requests import defaults
from fastdiff.requests.request import DTYPES, PRECISIONS, Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = f"bundled name, diffusers folder, file or hub id (default: {defaults.MODEL})"
    add("-m", "--model", metavar="MODEL", help=model)
    add_file_arguments(add)
    add("--revision", help="branch, tag or commit of a hub model")
    add(
        "--size",
        type=sizes,
        metavar="WxH,...",
        help="sizes in pixels (default: the training size)",
    )
    add("--batch", type=batches, default=(1,), metavar="N,...", help="pictures at once (default: 1)")
    add(
        "--card",
        metavar="sm_NN",
        help="compute capability of the card, such as sm_90 (default: this GPU's)",
    )
    add("--dtype", choices=DTYPES, help=f"model dtype; auto: bfloat16 (default: {defaults.DTYPE})")
    add("--precision", choices=PRECISIONS, help=f"weight precision (default: {defaults.PRECISION})")
    add_scheduler_argument(add)
    add(
        "--cfg-scale",
        dest="guidance_scale",
        type=float,
        metavar="X",
        help="guidance scale; 1 is no guidance (default: as to draw)",
    )
    add("--json", action="store_true", help="print one JSON object per size and batch")
    parser.epilog = (
        "The kernels go to Triton's cache, $TRITON_CACHE_DIR (default: ~/.triton/cache). Keep this folder in the image "
        "of a container. Weights are not read. Use the versions of fastdiff, torch and Triton that will draw. "
        "Exit codes: 0 every kernel is compiled; 1 a kernel does not compile; 2 there is no such card, or the model "
        "cannot do what was asked."
    )


def run(args: argparse.Namespace) -> int:
    """Print a row for each size and batch. InputError for what cannot be warmed."""
    require_stdout()
    steps = {"num_inference_steps": defaults.VERIFICATION_STEPS}
    flags = {name: value for name, value in vars(args).items() if name != "size"}
    request = Request.from_flags(flags | steps)
    from fastdiff.runs.drawing import find_model
    from fastdiff.warming.card import find_card
    from fastdiff.warming.drawing import warm

    model, card = find_model(request), find_card(args.card)
    if args.size and model.config.of_trajectories:
        raise InputError(f"--size: {model.name} draws trajectories; leave it out")
    each = [{"width": width, "height": height} for width, height in args.size or ()] or [{}]
    failed: list[str] = []
    for row in warm(request, model, card, each, args.batch):
        text = f"{row.size}, batch {row.batch}: {row.kernels} kernels, {row.compiled} compiled in {row.seconds:.1f} s"
        print(json.dumps(vars(row)) if args.json else printable(text), flush=True)
        failed += row.failed
    if failed:
        say("\n".join(["not compiled:", *map(printable, failed)]))
    return 1 if failed else 0

"""`fastdiff verify`: check a model's results against diffusers."""

import argparse
import json
from typing import TYPE_CHECKING

from fastdiff.cli.arguments import add_file_arguments, add_model_arguments
from fastdiff.cli.streams import printable, require_stdout
from fastdiff.requests.defaults import PRECISION, VERIFICATION_STEPS
from fastdiff.requests.request import PRECISIONS, Request
from fastdiff.runs.option_files.loras import with_loras_here

if TYPE_CHECKING:
    from fastdiff.verification.models import Verification
    from fastdiff.verification.precisions import Precisions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = add_model_arguments(parser, "model", note="", of_files=add_file_arguments)
    add(
        "--steps",
        dest="num_inference_steps",
        type=int,
        default=VERIFICATION_STEPS,
        metavar="N",
        help=f"denoising steps, if the model has a scheduler (default: {VERIFICATION_STEPS})",
    )
    help = "LoRA to hold against diffusers and peft; may be repeated (default WEIGHT: 1)"
    add("--lora", action="append", metavar="FILE[:WEIGHT]", help=help)
    help = "instead, measure the error of these weights and of bfloat16 against float32"
    add("--precision", choices=[name for name in PRECISIONS if name != PRECISION], help=help)
    add("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Print every comparison. Return 0 if all are within tolerance, else 1. InputError for an unusable model."""
    require_stdout()
    request = with_loras_here(Request.from_flags(vars(args) | {"num_images": 1}), None, None)
    if args.precision is not None:
        return _measure(request, args)
    from fastdiff.verification.models import compare_with_diffusers

    verification = compare_with_diffusers(request, args.device)
    print(json.dumps(verification.as_dict()) if args.json else _as_table(verification))
    return 0 if verification.passed else 1


def _measure(request: Request, args: argparse.Namespace) -> int:
    """Print the error of the precision. Return 0 if all errors are numbers, else 1."""
    from fastdiff.verification.precisions import compare_precisions

    measured = compare_precisions(request, args.device)
    print(json.dumps(measured.as_dict()) if args.json else _as_columns(measured))
    return 0 if measured.passed else 1


def _as_columns(measured: "Precisions") -> str:
    lines = [
        f"{measured.model}: {measured.precision} weights and bfloat16, both against float32 on {measured.device}",
        f"{'':<32}{'bfloat16':>12}{measured.precision:>12}",
    ]
    for each in measured.differences:
        lines.append(f"{each.what:<32}{each.beside:>9.2f} {each.unit:>2}{each.error:>9.2f} {each.unit:>2}")
    return "\n".join([*lines, "%: RMS error of each part for the same input; dB: PSNR of whole pictures"])


def _as_table(verification: "Verification") -> str:
    versions = verification.versions
    lines = [
        f"{verification.model}: fastdiff {versions['fastdiff']} against diffusers {versions['diffusers']}, "
        f"float32 on {verification.device}",
        *map(printable, verification.loras),
        f"{'':<32}{'max |error|':>12}{'largest':>10}{'allowed':>10}",
    ]
    for each in verification.comparisons:
        verdict = "ok" if each.passed else "FAILED"
        lines.append(f"{each.what:<32}{each.error:>12.1e}{each.largest:>10.2f}{each.allowed:>10.1e}  {verdict}")
    lines.append("within tolerance" if verification.passed else "NOT within tolerance")
    return "\n".join(lines)

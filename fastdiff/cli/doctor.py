"""`fastdiff doctor`: report what this machine has, what runs on it, and what is wrong."""

import argparse
import json

from fastdiff.cli.streams import printable, require_stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    check = "test each fast sm_90 kernel in a child process and save the result, for an unconfirmed Triton version"
    parser.add_argument("--check-kernels", action="store_true", help=check)
    parser.add_argument("--json", action="store_true", help="print a JSON object, for bug reports")
    parser.epilog = "Exit codes: 0 no problem found; 1 a problem found, and its line says what to do."


def run(args: argparse.Namespace) -> int:
    """Print the findings. Return 0 if nothing is wrong, else 1. InputError if the kernels cannot be checked here."""
    require_stdout()
    if args.check_kernels:
        return _check_kernels(args.json)
    from fastdiff.doctor import examination

    found = examination.examine()
    if args.json:
        print(json.dumps(examination.as_dict(found)))
    else:
        print("\n".join(map(printable, examination.as_table(found).splitlines())))
    return int(any(finding.is_wrong for finding in found))


def _check_kernels(as_json: bool) -> int:
    """Print the result of each plan. Return 0 if all passed, else 1."""
    from tqdm import tqdm

    from fastdiff.doctor import checking
    from fastdiff.kernels.plans import choices, confirmation, verdict

    device = checking.find_card()
    with tqdm(total=len(choices.CHOICES.plans), unit=" plans") as bar:
        made = checking.check_kernels(device, lambda plan, why: bar.update())
    if as_json:
        print(json.dumps(made.as_dict() | {"path": str(verdict.file())}))
        return int(bool(made.failed))
    for plan, why in sorted(made.failed.items()):
        print(printable(f"{plan}: {why}"))
    print(printable(f"{len(made.passed)} of {len(choices.CHOICES.plans)} plans passed; saved in {verdict.file()}"))
    if not confirmation.needs_verdict(device):
        print("this Triton version is already confirmed, so fastdiff does not read this result")
    return int(bool(made.failed))

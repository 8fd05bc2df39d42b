"""`fastdiff doctor`: say what this machine has, what runs on it, and what is wrong."""

import argparse
import json

from fastdiff.cli.streams import printable, require_stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    check = "try each fast kernel for sm_90 in a child process, and keep the verdict: for a Triton nobody confirmed"
    parser.add_argument("--check-kernels", action="store_true", help=check)
    parser.add_argument("--json", action="store_true", help="print a JSON object, for bug reports")
    parser.epilog = "Exit codes: 0 nothing is wrong; 1 something is, and its line says what to do."


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 where nothing is wrong, else 1. InputError for kernels that cannot be checked here."""
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
    """Print what became of the plans; 0 where all passed, else 1."""
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
    print(printable(f"{len(made.passed)} of {len(choices.CHOICES.plans)} plans passed; {verdict.file()} says so"))
    if not confirmation.needs_verdict(device):
        print("this Triton is confirmed, so that the verdict is not read here")
    return int(bool(made.failed))

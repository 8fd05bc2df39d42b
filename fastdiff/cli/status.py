"""`fastdiff status`: show the progress of a bulk run."""

import argparse
import json
from datetime import timedelta
from pathlib import Path

from fastdiff.cli.streams import printable, require_stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="output folder of the bulk run")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the progress. InputError for a folder without a bulk run."""
    from fastdiff.bulk.progress import read_state

    require_stdout()
    state = read_state(Path(args.folder))
    found = state.as_dict()
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{found['drawn']} of {found['pictures']} pictures, {found['done']} of {found['shards']} shards")
    if state.under_way:
        print(printable(f"shards in progress: {len(state.under_way)}, on {', '.join(found['workers'])}"))
    if found["pictures_per_second"]:
        print(f"{found['pictures_per_second']:g} pictures/s, {timedelta(seconds=found['seconds_left'])} left")
    for name, reason in state.given_up.items():
        print(printable(f"gave up on shard {name}: {reason}"))
    return 0

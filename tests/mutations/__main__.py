"""Mutation tests: change the code in one place at a time, and check that a test fails.

    python -m tests.mutations                   # all of them
    python -m tests.mutations cli bulk-3        # a room, and one mutation of another
    python -m tests.mutations --list
    python -m tests.mutations --tree ../before  # in another checkout, with its tests

Each mutation is applied in a copy of the tree, where the tests that should catch it run. The tests first run without
the mutation, so that a test that always fails catches nothing. A mutation that survives shows a gap in the tests.

Exit codes: 0 if all were caught; 1 if some were not; 2 if there is no such room, or a file does not have the text that
its mutation quotes.
"""

import argparse
import json
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.mutation import Mutation, Rooms, named
from tests.mutations.runner import Failure, Result, Runner
from tests.mutations.tables import read_rooms

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None, rooms: Rooms | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help="rooms, or names of mutations (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="parallel test runs (default: 2)")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, metavar="DIR", help="another checkout, which runs its own tests"
    )
    parser.add_argument("--list", action="store_true", help="print the mutations without running them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    args = parser.parse_args(argv)
    rooms = read_rooms() if rooms is None else rooms
    mutations, unknown = chosen(rooms, args.rooms)
    if unknown:
        print(f"no room {', '.join(unknown)}; there are {', '.join(rooms)}", file=sys.stderr)
        return 2
    stale = [error for mutation in mutations.values() if (error := error_of(mutation, args.tree))]
    if stale:
        print("\n".join(stale), file=sys.stderr)
        return 2
    if args.list:
        for name, mutation in mutations.items():
            print(f"{name:<20} {mutation.file}\n    {mutation.old!r}\n    {mutation.new!r}\n    {mutation.tests}")
        return 0
    results = []
    try:
        for result in Runner(args.tree, args.jobs).results(mutations, say=lambda line: print(line, flush=True)):
            results.append(result)
            print(line_of(result), flush=True)
    except Failure as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        entries = [vars(mutations[result.name]) | vars(result) for result in results]
        args.json.write_text(json.dumps(entries, indent=1) + "\n")
    print(table(results))
    return int(any(result.outcome != "caught" for result in results))


def chosen(rooms: Rooms, names: Sequence[str]) -> tuple[dict[str, Mutation], list[str]]:
    """Return the mutations of the named rooms (default: all) by name, and the unknown names."""
    everything = named(rooms)
    if not names:
        return everything, []
    found = {name: m for name, m in everything.items() if name in names or room_of(name) in names}
    return found, [name for name in names if name not in rooms and name not in everything]


def error_of(mutation: Mutation, root: Path) -> str | None:
    """Return the reason why a mutation cannot be applied, or None."""
    try:
        mutation.applied_to(root)
    except ValueError as error:
        return str(error)
    return None


def room_of(name: str) -> str:
    """Return the room of a mutation."""
    return name.rpartition("-")[0]


def line_of(result: Result) -> str:
    """Return a result on one line."""
    by = f"{result.by} ({result.tier}, {result.seconds:.0f} s)" if result.tier else result.by
    return f"{result.outcome:<9}{result.name:<22}{by}".rstrip()


def table(results: Sequence[Result]) -> str:
    """Return a line per room with the caught and total mutations, then a line per mutation that was not caught."""
    total = Counter(room_of(result.name) for result in results)
    caught = Counter(room_of(result.name) for result in results if result.outcome == "caught")
    lines = ["", *(f"{room:<22}{caught[room]:>4} / {count}" for room, count in sorted(total.items()))]
    lines += [f"{'all':<22}{caught.total():>4} / {total.total()}"]
    return "\n".join(lines + [line_of(result) for result in results if result.outcome != "caught"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # cleanup kills the processes
    sys.exit(main())

"""Fuzz with malformed folders, command lines, PNGs and calls for a given time, with fresh seeds.

    python -m tests.fuzz --minutes 30
    python -m tests.fuzz --again fuzz-failures/fuzz-abc

Cases run in worker processes. A case that hangs, uses too much memory or crashes its process is killed and reported,
and a new process continues. The folder of each failure is kept with a case.json, from which `--again` reproduces the
case.

Exit codes: 0 if no case failed, 1 if one did.
"""

import argparse
import functools
import itertools
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz import cases
from tests.fuzz.cases import Case
from tests.fuzz.workers import Worker

KEPT = 3  # folders per kind of failure


class Findings:
    """Counts of the cases and of the promises that they broke, over all workers."""

    def __init__(self, keep: Path) -> None:
        self.keep = keep
        self.tried: Counter[tuple[str, str]] = Counter()  # (group, ending)
        self.failures: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, group: str, ended: str, problems: list[str], case: Case, folder: Path) -> None:
        """Count a case, and keep its (model) folder if it broke a promise."""
        with self._lock:
            self.tried[group, "failed" if problems else ended] += 1
            for problem in problems:
                kind = re.sub(r"fuzz-\w+|\d+", "#", problem)
                self.failures[kind] += 1
                if self.failures[kind] == 1:
                    print(f"{problem}\n    {case.to_json()}", flush=True)
                if self.failures[kind] <= KEPT:
                    cases.keep(folder, self.keep)

    def __str__(self) -> str:
        ends = ("done", "refused", "failed")
        rows = [f"{'':<12}" + "".join(f"{end:>10}" for end in ends)]
        for group in dict.fromkeys(group for group, _ in self.tried):
            rows.append(f"{group:<12}" + "".join(f"{self.tried[group, end]:>10}" for end in ends))
        rows += [f"{count:>6} x {problem}" for problem, count in self.failures.most_common()]
        count = sum(self.tried.values())
        return "\n".join([*rows, f"{count} cases, {self.failures.total()} promises broken"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="duration (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--group", action="append", choices=cases.GROUPS, help="may be repeated (default: all)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for failures")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="run a kept case again")
    args = parser.parse_args()
    if args.again:
        return again(args.again)
    findings, groups = Findings(args.keep), itertools.cycle(args.group or cases.GROUPS)
    end = time.monotonic() + 60 * args.minutes
    threads = [threading.Thread(target=go_on, args=(groups, end, findings)) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(findings)
    return int(bool(findings.failures) or not findings.tried)  # no cases: the workers did not start


def again(kept: Path) -> int:
    """Run one case in this process, for a debugger."""
    case = Case.from_json((kept / cases.KEPT).read_text())
    with cases.made(case) as folder:
        outcome = cases.run(case, folder)
    print(f"{case}\n{outcome}")
    return int(bool(outcome.problems))


def go_on(groups: Any, end: float, findings: Findings) -> None:
    """Run rounds in a worker until the time is over; replace the worker when it ends."""
    worker = None
    try:
        while time.monotonic() < end:
            worker = worker or Worker()
            group = next(groups)
            if not worker.run_round(group, end, functools.partial(findings.add, group)):
                worker.close()
                worker = None
    finally:
        if worker:
            worker.close()


if __name__ == "__main__":
    sys.exit(main())

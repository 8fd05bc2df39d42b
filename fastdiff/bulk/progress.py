"""Progress of a bulk run, read from its folder, for the bar, the JSON lines and `fastdiff status`. Imports no torch."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastdiff.bulk.attempts import Attempts
from fastdiff.bulk.claims import read_leases
from fastdiff.bulk.folder import PLAN, Record, read_object
from fastdiff.errors import InputError
from fastdiff.runs.progress import show

_LOOK = 0.5  # seconds between reads of a folder


@dataclass(frozen=True)
class State:
    """The progress of a run."""

    pictures: int  # in the plan
    shards: int  # in the plan
    done: dict[int, Record] = field(default_factory=dict)  # by shard number
    given_up: dict[str, str] = field(default_factory=dict)  # reason by shard name
    under_way: dict[str, dict[str, Any]] = field(default_factory=dict)  # lease by shard name

    @property
    def drawn(self) -> int:
        """The number of pictures in finished shards."""
        return sum(record.count for record in self.done.values())

    @property
    def in_hand(self) -> int:
        """The number of pictures drawn in unfinished shards."""
        return sum(lease.get("drawn", 0) for lease in self.under_way.values())

    @property
    def is_complete(self) -> bool:
        return len(self.done) == self.shards

    @property
    def rate(self) -> float | None:
        """Pictures per second of the current workers, estimated from the finished shards."""
        seconds = sum(record.seconds for record in self.done.values())
        return len(self.under_way) * self.drawn / seconds if seconds and self.under_way else None

    def as_dict(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        left = self.pictures - self.drawn - self.in_hand
        return {
            "pictures": self.pictures,
            "drawn": self.drawn,
            "in_hand": self.in_hand,
            "shards": self.shards,
            "done": len(self.done),
            "given_up": self.given_up,
            "workers": sorted({f"{lease['host'].split()[0]}:{lease['pid']}" for lease in self.under_way.values()}),
            "pictures_per_second": self.rate and round(self.rate, 3),
            "seconds_left": self.rate and round(left / self.rate),
        }


class Reader:
    """Reads a run's folder repeatedly, but each shard's record only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[str, Record] = {}

    def read(self) -> State | None:
        """Return the progress, or None if there is no plan yet."""
        plan = (read_object(self._folder / PLAN) or {}).get("plan") or {}
        shards = self._folder / "shards"
        if "pictures" not in plan:
            return None
        with contextlib.suppress(OSError):
            names = {name for name in os.listdir(shards) if len(name) == len("000000.json") and name.endswith(".json")}
            self._records = {name: record for name, record in self._records.items() if name in names}
            for name in names - self._records.keys():
                record = Record.read(shards / name)
                if record is not None:
                    self._records[name] = record
        done = {record.shard: record for record in self._records.values()}
        under_way = {name: lease for name, lease in read_leases(shards).items() if f"{name}.json" not in self._records}
        count = -(-plan["pictures"] // plan["shard-size"])
        return State(plan["pictures"], count, done, Attempts(shards).given_up(), under_way)


def read_state(folder: Path) -> State:
    """Return the progress of the run in a folder. InputError if there is no run."""
    state = Reader(folder).read()
    if state is None:
        raise InputError(f"{folder} has no {PLAN} of a bulk run; give the --out folder of fastdiff bulk")
    return state


@contextlib.contextmanager
def shown(folder: Path, *, bar: bool, print_line: Callable[[str], None] | None) -> Iterator[None]:
    """Show the progress of all workers during a block, and pass a JSON line per finished shard to `print_line`."""
    end = threading.Event()
    thread = threading.Thread(target=_show, args=(Reader(folder), end, bar, print_line), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _show(reader: Reader, end: threading.Event, bar: bool, print_line: Callable[[str], None] | None) -> None:
    before, start = reader.read(), time.time()
    shown: Any = None
    told: set[int] = set()
    while True:
        is_last = end.wait(_LOOK)
        state = reader.read()
        if state is not None and bar:
            if shown is None:
                initial = before.drawn if before else 0
                shown = show(state.pictures, "pictures", initial=initial)
                shown.start_t = start  # the rate covers this run, including its startup
            shown.update(min(state.drawn + (0 if is_last else state.in_hand), state.pictures) - shown.n)
        if state is not None and print_line is not None:
            for number in sorted(state.done.keys() - told):
                told.add(number)
                print_line(json.dumps(asdict(state.done[number])))
        if is_last:
            break
    if shown is not None:
        shown.close()

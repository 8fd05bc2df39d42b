"""Whose turn it is: which of the waiting requests take their next step together."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """A request that waits for a step."""

    since: int  # grows from wait to wait
    key: Hashable  # requests with equal keys may take a step together
    pictures: int
    begun: int  # grows from request to request


def next_turn(waiting: Sequence[Waiting], most: Callable[[Hashable], int]) -> list[int]:
    """Return the indices of the requests that take the next step.

    For each key, the oldest requests form a group of up to `most(key)` pictures. The engine chooses the group with the
    request that has waited longest. So keys take turns, a request waits for the older requests of its key, and a batch
    stays together until one of its requests ends.
    """
    groups = dict[Hashable, list[int]]()
    for i in sorted(range(len(waiting)), key=lambda i: waiting[i].begun):
        groups.setdefault(waiting[i].key, []).append(i)
    ready = [_fitting(waiting, group, most(key)) for key, group in groups.items()]
    return min(ready, key=lambda group: min(waiting[i].since for i in group))


def _fitting(waiting: Sequence[Waiting], group: Sequence[int], most: int) -> list[int]:
    """Return the first request of a group, and each later one that still fits."""
    count, chosen = 0, list[int]()
    for i in group:
        if not chosen or count + waiting[i].pictures <= most:
            chosen.append(i)
            count += waiting[i].pictures
    return chosen


def graph_size(count: int) -> int:
    """Return the rows of a graph for `count` pictures: a power of two, so that few graphs are captured."""
    return 1 << (count - 1).bit_length()

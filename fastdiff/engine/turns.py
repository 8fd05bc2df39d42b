"""Whose turn it is: which of the waiting requests take their next step together."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """A request that waits for a step."""

    since: int  # grows from wait to wait
    key: Hashable  # requests with equal keys may take a step together
    pictures: int


def next_turn(waiting: Sequence[Waiting], most: int) -> list[int]:
    """Return the indices of the requests that take the next step.

    The request that has waited longest goes first, with the others of its key, oldest first, up to `most` pictures. A
    request that took a step goes to the end of the line. So keys take turns: a request waits for at most one step of
    each other key, and for the older requests of its own.
    """
    oldest_first = sorted(range(len(waiting)), key=lambda i: waiting[i].since)
    key, count, chosen = waiting[oldest_first[0]].key, 0, list[int]()
    for i in oldest_first:
        if waiting[i].key == key and (not chosen or count + waiting[i].pictures <= most):
            chosen.append(i)
            count += waiting[i].pictures
    return chosen


def graph_size(count: int) -> int:
    """Return the rows of a graph for `count` pictures: a power of two, so that few graphs are captured."""
    return 1 << (count - 1).bit_length()

"""Whose turn it is, as numbers."""

import pytest

from fastdiff.engine.turns import Waiting, graph_size, next_turn


@pytest.mark.parametrize(
    ("waiting", "most", "expected"),
    [
        ([(0, "a", 1, 0)], 4, [0]),
        ([(2, "a", 1, 0), (1, "b", 1, 1), (3, "b", 1, 2)], 4, [1, 2]),
        ([(3, "a", 1, 2), (4, "a", 1, 1), (5, "a", 1, 0)], 2, [2, 1]),  # those that began first
        ([(0, "a", 9, 0), (1, "a", 1, 1)], 4, [0]),  # more pictures than share a step
        ([(0, "a", 2, 0), (1, "a", 3, 1), (2, "a", 2, 2)], 4, [0, 2]),
        ([(0, "a", 3, 0), (1, "a", 2, 1)], 4, [0]),
        ([(5, "a", 1, 0), (0, "a", 1, 1), (4, "b", 1, 2)], 1, [2]),  # a younger request does not bring its key forward
    ],
)
def test_the_key_that_waits_longest_goes_with_the_oldest_requests(waiting, most, expected):
    assert next_turn([Waiting(*each) for each in waiting], lambda key: most) == expected


def test_no_request_waits_for_more_than_one_step_of_each_other_key():
    waiting = [Waiting(i, key, 1, i) for i, key in enumerate("aabcab")]
    order = len(waiting)
    taken = []
    for _ in range(6):
        turn = next_turn(waiting, lambda key: 16)
        taken.append(waiting[turn[0]].key)
        for i in turn:
            waiting[i] = waiting[i]._replace(since=order)
            order += 1
    assert taken == ["a", "b", "c"] * 2


def test_graphs_have_sizes_of_powers_of_two():
    assert [graph_size(count) for count in (1, 2, 3, 4, 5, 9, 16)] == [1, 2, 4, 4, 8, 16, 16]

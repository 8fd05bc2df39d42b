"""The Gluon emulation distinguishes partitions that wait forever from slow ones."""

import time

import pytest

from tests.kernels.plans.emulated_gluon import Barrier, Crew, _running, warp_specialize


@pytest.fixture(autouse=True)
def program(monkeypatch):
    for name, value in {"program": 0, "programs": 1, "crew": Crew(1)}.items():
        monkeypatch.setattr(_running, name, value, raising=False)
    _running.products, _running.stores = [], []


def test_partitions_that_all_wait_are_an_error():
    one, other = Barrier(), Barrier()
    with pytest.raises(AssertionError, match="a barrier that never completes"):
        warp_specialize([(lambda: one.wait(0), ()), (lambda: other.wait(0), ())], [], [])


def test_a_partition_that_waits_for_one_that_ended_is_an_error():
    barrier = Barrier()
    with pytest.raises(AssertionError, match="a barrier that never completes"):
        warp_specialize([(lambda: barrier.wait(0), ()), (lambda: None, ())], [], [])


def test_of_a_partition_that_fails_the_error_is_raised():
    def fail():
        raise ZeroDivisionError

    barrier = Barrier()
    with pytest.raises(ZeroDivisionError):
        warp_specialize([(lambda: barrier.wait(0), ()), (fail, ())], [], [])


def test_a_kernel_without_partitions_waits_for_nobody():
    with pytest.raises(AssertionError, match="a barrier that never completes"):
        Barrier().wait(0)


def test_a_slow_partition_is_waited_for():
    barrier, seen = Barrier(), []

    def arrive():
        time.sleep(0.05)
        barrier.arrive()

    warp_specialize([(lambda: seen.append(barrier.wait(0)), ()), (arrive, ())], [], [])
    assert seen == [None] and barrier.phase == 1

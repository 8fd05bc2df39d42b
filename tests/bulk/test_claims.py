"""Leases: one holder at a time, until its process is gone or stops renewing."""

import json
import subprocess
import sys
import threading
import time

import pytest

from fastdiff.bulk import claims as claims_module
from fastdiff.bulk.attempts import Attempts
from fastdiff.bulk.claims import DEAD, Claims, Process, read_leases
from tests.support.waiting import wait_for


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def elsewhere(tmp_path):
    """Writes a lease as if from another host."""

    def write(name="000000.lease-1", beats=0):
        content = {"host": "another", "pid": 1, "start": "5", "token": "t", "drawn": 3, "beats": beats}
        (tmp_path / name).write_text(json.dumps(content))

    return write


def test_one_holder_at_a_time(tmp_path):
    first, second = Claims(tmp_path), Claims(tmp_path)
    lease = first.claim("000000")
    assert lease and second.claim("000000") is None and first.claim("000000") is None
    assert second.claim("000001")
    first.release(lease)
    assert second.claim("000000")


def test_of_many_one_gets_it(tmp_path, elsewhere, clock):
    every = [Claims(tmp_path, clock) for _ in range(8)]
    elsewhere()
    assert [claims.claim("000000") for claims in every] == [None] * 8
    clock.now += DEAD + 1
    found, start = [], threading.Barrier(8)

    def take(claims):
        start.wait()
        found.append(claims.claim("000000"))

    threads = [threading.Thread(target=take, args=(claims,)) for claims in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and sum(lease is not None for lease in found) == 1


def test_a_lease_is_dead_once_it_stands_still(tmp_path, elsewhere, clock):
    claims = Claims(tmp_path, clock)
    elsewhere()
    assert claims.claim("000000") is None
    clock.now += DEAD - 1
    assert claims.claim("000000") is None
    elsewhere(beats=1)
    clock.now += DEAD - 1
    assert claims.claim("000000") is None
    clock.now += DEAD
    lease = claims.claim("000000")
    assert lease and sorted(path.name for path in tmp_path.iterdir()) == ["000000.lease-1", "000000.lease-2"]
    claims.release(lease)
    assert not list(tmp_path.iterdir())


def test_the_lease_above_all_dead_ones_is_taken(tmp_path):
    for number in (1, 2):
        gone = {"host": Process.own().host, "pid": 2**22 + 1, "start": "5", "token": "t", "drawn": 0}
        (tmp_path / f"000000.lease-{number}").write_text(json.dumps(gone))
    assert Claims(tmp_path).claim("000000") and (tmp_path / "000000.lease-3").exists()


def test_one_that_is_not_whole_is_dead_later(tmp_path, clock):
    claims = Claims(tmp_path, clock)
    (tmp_path / "000000.lease-1").write_bytes(b"")
    assert claims.claim("000000") is None
    clock.now += DEAD
    assert claims.claim("000000")


@pytest.mark.parametrize("hours", [-1000, 1000])
def test_no_clock_of_the_wall_is_asked(tmp_path, elsewhere, clock, monkeypatch, hours):
    import os

    claims = Claims(tmp_path, clock)
    elsewhere()
    os.utime(tmp_path / "000000.lease-1", (time.time() + 3600 * hours,) * 2)
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600 * hours)
    assert claims.claim("000000") is None
    clock.now += DEAD - 1
    assert claims.claim("000000") is None


def test_the_lease_of_a_process_that_is_gone_is_free_at_once(tmp_path):
    code = (
        "import pathlib, sys; from fastdiff.bulk.claims import Claims; lease = Claims(pathlib.Path(sys.argv[1]))"
        ".claim('000000'); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        claims = Claims(tmp_path)
        assert claims.claim("000000") is None
        holder.kill()
        wait_for(lambda: claims.claim("000000"))  # the process is a zombie by then


def test_a_process_of_the_same_number_is_another_one():
    own = Process.own()
    assert not own.is_gone()
    assert Process(own.host, own.pid, "1").is_gone()
    assert not Process("another", own.pid, "1").is_gone() and not Process(own.host, 2**22 + 1, None).is_gone()


def test_a_held_lease_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(claims_module, "BEAT", 0.01)
    with Claims(tmp_path) as claims:
        lease = claims.claim("000000")
        lease.drawn = 7
        first = (tmp_path / "000000.lease-1").read_bytes()
        wait_for(lambda: read_leases(tmp_path)["000000"]["drawn"] == 7)
        later = (tmp_path / "000000.lease-1").read_bytes()
    assert later != first and len(later) == len(first) == 512
    assert not list(tmp_path.iterdir())  # leaving the block releases all leases


def test_every_beat_changes_the_content(tmp_path):
    """A lease stays alive even if one picture takes a minute and the number of pictures does not change."""
    lease = Claims(tmp_path).claim("000000")
    contents = set()
    for _ in range(3):
        lease.beat()
        contents.add((tmp_path / "000000.lease-1").read_bytes())
    assert len(contents) == 3


def test_no_lease_is_added_while_others_beat(tmp_path):
    """The renewing thread iterates over the set of leases, which must not change meanwhile."""
    claims, is_locked = Claims(tmp_path), []

    class Held(set):
        def add(self, lease):
            is_locked.append(claims._lock.locked())
            super().add(lease)

        def remove(self, lease):
            is_locked.append(claims._lock.locked())
            super().remove(lease)

    claims._held = Held()
    claims.release(claims.claim("000000"))
    assert is_locked == [True, True]


def test_leases_of_gone_processes_are_not_shown(tmp_path, elsewhere):
    elsewhere()
    elsewhere("000002.lease-1")
    elsewhere("000002.lease-2", beats=9)
    gone = {"host": Process.own().host, "pid": 2**22 + 1, "start": "5", "token": "t", "drawn": 0}
    (tmp_path / "000001.lease-1").write_text(json.dumps(gone))
    leases = read_leases(tmp_path)
    assert sorted(leases) == ["000000", "000002"] and leases["000002"]["beats"] == 9


def test_three_deaths_are_enough(tmp_path):
    attempts = Attempts(tmp_path)
    assert [attempts.begin("000000", f"host:{i}") for i in range(4)] == [True, True, True, False]
    assert attempts.given_up() == {"000000": "host:2 died while drawing it"} and not attempts.tried()


def test_attempts_that_were_taken_back_do_not_count(tmp_path):
    attempts = Attempts(tmp_path)
    for _ in range(5):
        assert attempts.begin("000000", "host:1")
        attempts.take_back("000000")
    attempts.begin("000000", "host:1")
    attempts.fail("000000", "NaN")
    attempts.begin("000000", "host:1")
    attempts.take_back("000000")
    assert attempts.failures("000000") == ["NaN"] and attempts.tried() == {"000000"}
    attempts.forget("000000")
    assert not list(tmp_path.iterdir())


def test_every_launch_counts_anew_and_restarts_of_one_do_not(tmp_path):
    attempts = Attempts(tmp_path)
    attempts.begin_launch("a")
    for _ in range(3):
        attempts.begin("000000", "host:1")
        attempts.fail("000000", "NaN")
        attempts.begin_launch("a")
    attempts.begin("000001", "host:1")
    assert attempts.given_up() and attempts.tried() == {"000001"}
    attempts.begin_launch("b")
    assert not attempts.given_up() and not attempts.tried()

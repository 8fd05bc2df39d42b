"""Runs that are cancelled, before their first step and between steps."""

import asyncio
import threading

import pytest

from fastdiff.ui.parts.running import _LEFT, Cancelled, Turns, left_by_cancel


def test_a_run_that_is_cancelled_before_its_first_step_computes_none():
    turns, ended, computed = Turns(), threading.Event(), []

    def run():
        yield "Starting"
        try:
            yield from turns.take(map(computed.append, [1]))
        finally:
            ended.set()

    async def cancel_while_it_waits() -> None:
        steps = left_by_cancel(run)()
        with turns._step:
            assert await anext(steps) == "Starting"
            first = asyncio.create_task(anext(steps))
            await asyncio.sleep(0.1)
            first.cancel()
            await asyncio.wait([first])
        assert await asyncio.to_thread(ended.wait, 30)

    asyncio.run(cancel_while_it_waits())
    assert computed == []


def test_a_run_that_was_left_begins_no_other_step():
    left = threading.Event()
    before = _LEFT.set(left)
    try:
        steps = Turns().take(iter([1, 2]))
        assert next(steps) == 1
        left.set()
        with pytest.raises(Cancelled):
            next(steps)
    finally:
        _LEFT.reset(before)

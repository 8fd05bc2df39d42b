"""Runs that are cancelled while they wait."""

import asyncio
import threading

from fastdiff.ui.tabs.running import left_by_cancel


def test_a_run_that_is_cancelled_before_its_first_step_computes_none(models):
    ended, computed = threading.Event(), []

    def run():
        yield "Starting"
        try:
            yield from models.in_turn(map(computed.append, [1]))
        finally:
            ended.set()

    async def cancel_while_it_waits() -> None:
        steps = left_by_cancel(run)()
        with models._computing:
            assert await anext(steps) == "Starting"
            first = asyncio.create_task(anext(steps))
            await asyncio.sleep(0.1)
            first.cancel()
            await asyncio.wait([first])
        assert await asyncio.to_thread(ended.wait, 30)

    asyncio.run(cancel_while_it_waits())
    assert computed == []

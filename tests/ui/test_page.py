"""The page's list of runs."""

import re
import time

from tests.support.waiting import wait_for


def test_a_waiting_run_is_cancelled_within_a_tenth_of_a_second_while_a_step_goes_on(visit, slow_steps):
    slow_steps.seconds = 100
    page = visit()
    start, cancel = page.event("generate", "click"), page.event("generate-runs", "click")

    def press(run: str) -> str:
        """Press Cancel of a run, and return the list of the other runs."""
        body = {"data": [None], "fn_index": cancel["id"], "session_hash": page.session_hash, "event_data": {"run": run}}
        return page.http.post("/gradio_api/run/predict", json=body).raise_for_status().json()["data"][0]

    for _ in range(6):
        page.call(start, page.inputs(start, Steps=2))
    running, *waiting = re.findall(r'<button data-run="(\w+)"', page.look())[:6]
    seconds = []
    for run in waiting:
        began = time.perf_counter()
        left = press(run)
        seconds.append(time.perf_counter() - began)
        assert f'data-run="{run}"' not in left and f'data-run="{running}"' in left
    assert min(seconds) < 0.1, "the fastest of five, because another process may slow the others"
    assert press(running) == "" and not slow_steps
    slow_steps.turns.release(100)


def test_two_users_draw_at_once_and_each_sees_the_own_progress(visit, slow_steps):
    slow_steps.seconds = 100
    pages = [visit(), visit()]
    for page in pages:
        start = page.event("generate", "click")
        page.call(start, page.inputs(start, Steps=3))
    for page in pages:
        seen = page.look()
        assert seen.count("<li") == 2 * 1 and "Waiting" not in seen, "one run, in the lists of both tabs"
    slow_steps.turns.release(100)
    for page in pages:
        wait_for(lambda page=page: "Drew 1 picture" in page.look())
    assert len(slow_steps) == 2 * 3

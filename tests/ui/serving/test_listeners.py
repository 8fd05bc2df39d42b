"""Abandoned and cancelled jobs end; jobs with a listener go on."""

import time

import pytest

from fastdiff.ui.serving import listeners
from tests.support.waiting import wait_for

DATA = ["emoji64", None, 0, 8, 3, *[None] * 5, 1, *[None] * 3]  # 8 pictures of 3 steps, one after the other


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(listeners, "PATIENCE", 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("posted", ["call", "join"])
def test_a_job_without_a_listener_ends_and_lets_the_next_one_in(visit, slow_steps, posted):
    page, other = visit(), visit()
    event = page.event("generate", "click")
    if posted == "call":
        assert page.http.post("/gradio_api/call/generate", json={"data": DATA}).status_code == 200
    else:
        assert page.join(event, page.inputs(event, Pictures=32, Steps=50)).status_code == 200
    result = other.call(event, other.inputs(event, Steps=2, Pictures=1))
    assert result["success"] and 2 < len(slow_steps) < 2 + 12, "some of the first, all of the second"


@pytest.mark.slow
def test_its_finished_pictures_stay_in_history(visit, engine, slow_steps):
    page = visit()
    event = page.event("generate", "click")
    page.join(event, page.inputs(event, Pictures=32, Steps=1, Seed=3, **{"Batch size": 1}))
    wait_for(lambda: slow_steps, seconds=60)
    steps = 0
    while engine.turns.are_taken or len(slow_steps) > steps:
        steps = len(slow_steps)
        time.sleep(0.5)
    assert steps < 32
    history = page.call(page.event("history-tab", "select"), [None, 1])
    assert "seed 3" in str(history["output"]["data"])


@pytest.mark.slow
def test_a_job_that_is_listened_to_goes_on(visit, slow_steps):
    page = visit()
    event_id = page.http.post("/gradio_api/call/generate", json={"data": DATA}).json()["event_id"]
    assert "event: complete" in page.http.get(f"/gradio_api/call/generate/{event_id}").text
    event = page.event("generate", "click")
    assert page.call(event, page.inputs(event, Steps=12))["success"]
    assert len(slow_steps) == 8 * 3 + 12


@pytest.mark.slow
def test_the_next_job_waits_for_the_step_of_a_cancelled_one_and_no_longer(visit, engine, slow_steps):
    slow_steps.seconds = 1.0
    page, other = visit(), visit()
    event = page.event("generate", "click")
    job = page.join(event, page.inputs(event, Steps=20)).json()["event_id"]
    next(each for each in page.messages() if each["msg"] == "process_generating")
    wait_for(lambda: engine.turns.are_taken, seconds=60)
    ids = {"session_hash": page.session_hash, "fn_index": event["id"], "event_id": job}
    start = time.monotonic()
    assert page.http.post("/gradio_api/cancel", json=ids).status_code == 200
    assert time.monotonic() - start < 0.5 and not slow_steps
    assert other.join(event, other.inputs(event, Steps=1)).status_code == 200
    messages = other.messages()
    assert "Waiting for the step" in str(next(each for each in messages if each["msg"] == "process_generating"))
    assert next(each for each in messages if each["msg"] == "process_completed")["success"]
    cancelled, drawn = slow_steps
    assert 1.0 <= drawn - cancelled < 3.0
